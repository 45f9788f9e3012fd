"""Pseudo-random orders that are the same on every machine.

Members must agree on held-out text and on the blocks of each slot without communication, whatever
their versions of torch and numpy. Library generators do not guarantee this, so orders come from
hashing each index with SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014) and sorting by the hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def permutation(size: int, *, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the integers below ``size`` in an order determined by ``key``.

    Args:
        size: How many.
        key: Any integers, e.g. seed, slot and pass.
    """
    return np.argsort(hashes(size, key=key), kind="stable").astype(np.int64, copy=False)


def hashes(size: int, *, key: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return `size` pseudo-random unsigned 64-bit integers determined by `key`."""
    start = 0
    for part in key:
        start = _mix((start ^ _mix((part + _GAMMA) & _MASK)) + _GAMMA & _MASK)
    values = np.arange(1, size + 1, dtype=np.uint64)
    values *= np.uint64(_GAMMA)  # wraps modulo 2**64, as meant
    values += np.uint64(start)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


def _mix(value: int) -> int:
    """Return SplitMix64's finaliser of one 64-bit integer."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
