"""Pseudo-random orders that are the same on every machine and library version.

Members must agree without communication, which library generators do not guarantee, so each index
is hashed with SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
2014) and sorted by its hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def permutation(size: int, *, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the integers below `size` in an order determined by `key`, e.g. (seed, slot, pass)."""
    return np.argsort(hashes(size, key=key), kind="stable").astype(np.int64, copy=False)


def hashes(size: int, *, key: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return `size` pseudo-random unsigned 64-bit integers determined by `key`."""
    start = 0
    for part in key:
        start = _mix((start ^ _mix((part + _GAMMA) & _MASK)) + _GAMMA & _MASK)
    values = np.arange(1, size + 1, dtype=np.uint64)
    values *= np.uint64(_GAMMA)  # wraps modulo 2**64, as intended
    values += np.uint64(start)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


def _mix(value: int) -> int:
    """SplitMix64's finalizer."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
