"""Generated images: the digits of a seven-segment display, at random positions in noise.

For tests and examples: they need no files. Positions are independent of the digit, so single pixels
are not sufficient to classify.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.data.order import hashes

SIDE = 16

_HEIGHT, _WIDTH, _STROKE = 11, 7, 2
_DIMMEST, _NOISE = 128, 96
_KEY = 0x73656773
# Segments a to g (top, right above, right below, bottom, left below, left above, middle), by digit.
_LIT = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")


def draw(count: int, *, key: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images ``(count, SIDE, SIDE)`` and their digits ``(count,)``, determined by `key`."""
    digits = np.arange(count) % len(_LIT)
    chances = hashes(3 * count, key=(_KEY, key, 0)).reshape(3, count)
    tops = (chances[0] % np.uint64(SIDE - _HEIGHT + 1)).astype(np.int64)
    lefts = (chances[1] % np.uint64(SIDE - _WIDTH + 1)).astype(np.int64)
    light = _DIMMEST + (chances[2] % np.uint64(256 - _DIMMEST - _NOISE)).astype(np.int64)
    noise = hashes(count * SIDE * SIDE, key=(_KEY, key, 1)) % np.uint64(_NOISE)
    images = noise.astype(np.uint8).reshape(count, SIDE, SIDE)
    rows = tops[:, None, None] + np.arange(_HEIGHT)[:, None]
    columns = lefts[:, None, None] + np.arange(_WIDTH)
    drawn = _glyphs()[digits] * light[:, None, None].astype(np.uint8)
    images[np.arange(count)[:, None, None], rows, columns] += drawn
    return images, digits.astype(np.uint8)


def _glyphs() -> NDArray[np.uint8]:
    """Return a mask per digit, ``(10, height, width)``."""
    middle = (_HEIGHT - _STROKE) // 2
    upper, lower = slice(0, middle + _STROKE), slice(middle, _HEIGHT)
    left, right, all_of_it = slice(0, _STROKE), slice(_WIDTH - _STROKE, _WIDTH), slice(None)
    places = {
        "a": (slice(0, _STROKE), all_of_it),
        "b": (upper, right),
        "c": (lower, right),
        "d": (slice(_HEIGHT - _STROKE, _HEIGHT), all_of_it),
        "e": (lower, left),
        "f": (upper, left),
        "g": (slice(middle, middle + _STROKE), all_of_it),
    }
    glyphs = np.zeros((len(_LIT), _HEIGHT, _WIDTH), dtype=np.uint8)
    for glyph, lit in zip(glyphs, _LIT, strict=True):
        for segment in lit:
            glyph[places[segment]] = 1
    return glyphs
