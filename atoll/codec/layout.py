"""Where the numbers of a vector are in its packet, for codecs whose parts encode apart.

Loads no torch: forecasts ask, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Units = tuple[tuple[int, int], ...]
"""Arrays one after the other: elements of a unit, and its bytes; a last unit may hold fewer."""

CASTS: dict[str, Units] = {"fp32": ((1, 4),), "bf16": ((1, 2),), "fp16": ((1, 2),)}
BYTES: Units = ((1, 1),)
BEFORE_BYTES = {"int8": (256, 4), "sigma8": (65_536, 1024)}
"""Codecs with one byte for each number, and what stands before them: elements of a block, bytes."""


def layout_of(spec: str) -> Units:
    """Return the arrays of a codec's packets; empty where parts of a vector do not encode apart.

    Args:
        spec: canonical name of a codec without wrappers, e.g. `int8:256`.
    """
    name, _, argument = spec.partition(":")
    if name in CASTS and not argument:
        return CASTS[name]
    if name not in BEFORE_BYTES or "|" in argument:
        return ()
    elements, nbytes = BEFORE_BYTES[name]
    if name == "int8" and argument.isdecimal():
        elements = int(argument)
    return ((elements, nbytes), *BYTES)


def last_bytes(codec: str, nbytes: float, *, piece: int) -> float:
    """Return how much of a mean's packet cannot be sent before the last byte of the sum is there.

    Args:
        codec: the job's, perhaps with feedback.
        nbytes: of the packet.
        piece: bytes in which packets are sent.
    """
    units = layout_of(codec.removeprefix("feedback(").removesuffix(")"))
    if not units or nbytes <= piece:
        return nbytes
    if len(units) == 1:
        return float(piece)
    # What stands before the numbers is known last, and a block ends inside a piece.
    shares = [size / unit for unit, size in units]
    before = nbytes * (1 - shares[-1] / math.fsum(shares))
    return min(nbytes, (math.ceil(before / piece) + 2.0) * piece)


class Layout:
    """Where the elements of a vector are in the bytes of its packet.

    Legend: n elements, of which the first `done` are there.
    """

    def __init__(self, units: Sequence[tuple[int, int]], elements: int) -> None:
        """Lay out a vector of n elements."""
        self._elements, base = elements, 0
        self._arrays: list[tuple[int, int, int, int]] = []
        for unit, nbytes in units:
            end = base + -(-elements // unit) * nbytes
            self._arrays.append((unit, nbytes, base, end))
            base = end
        self.total_bytes = base
        self._grain = math.lcm(*(unit for unit, _ in units))

    def elements_in(self, nbytes: int) -> int:
        """Return how many elements the first bytes of a packet hold, whole units only."""
        found = self._elements
        for unit, size, base, end in self._arrays:
            if nbytes < end:
                found = min(found, max(0, nbytes - base) // size * unit)
        return found if found == self._elements else found // self._grain * self._grain

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the first byte and the one after the last, of each array, of some elements."""
        return [
            (base + start // unit * size, base + -(-stop // unit) * size)
            for unit, size, base, _ in self._arrays
        ]
