"""Where the numbers of a vector are in its packet, for codecs whose parts encode apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec

Units = tuple[tuple[int, int], ...]
"""Arrays one after the other: elements of a unit, and its bytes; a last unit may hold fewer."""


@runtime_checkable
class LaidOut(Protocol):
    """A codec that encodes parts of a vector to the bytes that they have in the whole packet."""

    @property
    def layout(self) -> Units:
        """The arrays of a packet."""

    def cut(self, packet: Packet, start: int, stop: int) -> Packet:
        """Return the packet of the elements from `start` to `stop`, whole units."""


def last_bytes(codec: str, nbytes: float, *, piece: int) -> float:
    """Return how much of a mean's packet cannot be sent before the last byte of the sum is there.

    Args:
        codec: the job's, perhaps with feedback.
        nbytes: of the packet.
        piece: bytes in which packets are sent.
    """
    coder = make_codec(codec).base
    if not isinstance(coder, LaidOut) or nbytes <= piece:
        return nbytes
    units = coder.layout
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
