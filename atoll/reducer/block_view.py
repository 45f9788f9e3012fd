"""Contributions as the rows of a matrix that is never fully in memory.

Legend: n rows (contributions), P columns (elements of a vector), w columns of a strip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.codec.quantized.cast import STRIP
from atoll.digest import Digest
from atoll.errors import WireError
from atoll.reducer.mean import Share


@runtime_checkable
class Sliceable(Protocol):
    """A codec with packets that can be cut and decoded in parts."""

    @property
    def grain(self) -> int:
        """Cuts must be at multiples of this many elements."""

    def cut(self, packet: Packet, start: int, stop: int) -> Packet:
        """Return the packet of the elements from `start` to `stop`."""


class BlockView:
    """n contributions, decoded strip by strip.

    Needs memory for one strip per vector with `Sliceable` codecs, else for n whole vectors.
    """

    def __init__(
        self, shares: Sequence[Share], codec: Codec, *, scales: Sequence[float] | None = None
    ) -> None:
        """View contributions of one codec and size; `scales` are factors of the rows, default 1."""
        self.shares, self._codec = list(shares), codec.base
        self._scales = list(scales) if scales is not None else [1.0] * len(shares)
        self.num_elements = shares[0].packet.num_elements
        self._whole: dict[int, Tensor] = {}
        """Decoded rows of a codec that is not `Sliceable`."""

    def __len__(self) -> int:
        return len(self.shares)

    def strips(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the columns of a strip and its rows: float32, (n, w), overwritten by the next."""
        width = self._width()
        matrix = torch.empty(len(self), min(width, self.num_elements))
        for start in range(0, self.num_elements, width):
            stop = min(start + width, self.num_elements)
            part = matrix[:, : stop - start]
            for index in range(len(self)):
                part[index].copy_(self._part(index, start, stop))
                if self._scales[index] != 1.0:
                    part[index].mul_(self._scales[index])
            yield slice(start, stop), part

    def combination(self, factors: Sequence[float]) -> Tensor:
        """Return the sum of the rows times a factor each, (P,); skips rows with factor 0."""
        vector = torch.zeros(self.num_elements)
        for share, scale, factor in zip(self.shares, self._scales, factors, strict=True):
            if scale * factor != 0.0:
                self._codec.decode_add(share.packet, out=vector, weight=scale * factor)
        return vector

    def digests(self) -> list[bytes]:
        """Return digests of the encoded rows, with which equal scores are ordered."""
        return [Digest(share.packet.data).digest() for share in self.shares]

    def norms(self) -> list[float]:
        """Return the L2 norm of every row; not finite for NaN, infinite or malformed values."""
        found = []
        for index in range(len(self)):
            try:
                squares = sum(
                    float(self._part(index, start, stop).double().square().sum())
                    for start, stop in self.bounds()
                )
            except WireError:
                squares = math.nan
            found.append(self._scales[index] * math.sqrt(squares))
        return found

    def row(self, index: int, start: int, stop: int) -> Tensor:
        """Return the unscaled elements of a row between two of the `bounds`, (stop - start,)."""
        return self._part(index, start, stop)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the first column of each strip, and the one after its last."""
        width = self._width()
        for start in range(0, self.num_elements, width):
            yield start, min(start + width, self.num_elements)

    def _width(self) -> int:
        if not isinstance(self._codec, Sliceable):
            return STRIP
        grain = self._codec.grain
        return max(1, STRIP // grain) * grain

    def _part(self, index: int, start: int, stop: int) -> Tensor:
        """Return the unscaled elements of a row, (stop - start,)."""
        if isinstance(self._codec, Sliceable):
            packet = self._codec.cut(self.shares[index].packet, start, stop)
            return self._codec.decode(packet)
        if index not in self._whole:
            self._whole[index] = self._codec.decode(self.shares[index].packet)
        return self._whole[index][start:stop]
