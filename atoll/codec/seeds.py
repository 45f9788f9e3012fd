"""Pseudo-random numbers that are the same on every machine and with every library version."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

# The constants of SplitMix64.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(*parts: int | str) -> int:
    """Return 63 bits that depend on all parts and their order."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = _scrambled(state + np.uint64(number & 0xFFFF_FFFF_FFFF_FFFF))
    return int(state[0] >> np.uint64(1))


def random_words(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return `count` uniformly distributed 64-bit words (SplitMix64)."""
    return _scrambled(np.uint64(seed) + np.arange(count, dtype=np.uint64) * _STEP)


def permutation(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a permutation of 0..count-1, determined by the seed."""
    return np.argsort(random_words(seed, count), kind="stable").astype(np.int64)


def _scrambled(
    words: np.ndarray[Any, np.dtype[np.uint64]],
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return SplitMix64's finaliser of every word; arithmetic is modulo 2**64."""
    words = words + _STEP
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
