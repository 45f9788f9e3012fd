"""topk: send the share of elements with the largest magnitudes.

A mean of sparse vectors is less sparse, so members all-gather the packets and add them up. Of equal
magnitudes the first ones are taken; a non-finite value counts as the largest. The other values are
lost unless the codec is used in `feedback(...)`.

`topk:D` chooses from the whole vector, `topk:D:C` the same number from every C elements, so that
layers with small values are not left out.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; with error feedback:
Stich et al. 2018 (https://arxiv.org/abs/1809.07599); in chunks: Sarfi et al. 2025, "Communication
Efficient LLM Pre-training with SparseLoCo" (https://arxiv.org/abs/2508.15706). Differs from them:
over the whole vector, not per tensor (chunks are runs of it, not tiles of matrices), and without
sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.quantized.packing import Bytes, Indices
from atoll.codec.sparse.positions import positions_bytes, read_positions, write_positions
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.selecting import Selecting, Where, check_density
from atoll.errors import ConfigError

_MAGNITUDE = np.int32(0x7FFF_FFFF)
_STRIP = 1 << 20
"""Elements of chunks that are searched at once."""


class TopK(Selecting):
    """The largest magnitudes, at least one of the vector or of each chunk.

    Raises:
        ConfigError: `density` (share of the elements sent) is not above 0 and at most 1, or `chunk`
            is below 2.
    """

    needs_allgather = True

    def __init__(self, density: float, values: Codec, *, chunk: int = 0) -> None:
        self.density, self.chunk = check_density("topk", density), chunk
        if chunk == 1:
            raise ConfigError(
                "a chunk of codec topk is too small", given=chunk, expected="2 or more elements",
                remedy="topk:0.015625:4096",
            )  # fmt: skip
        super().__init__(f"topk:{density:g}:{chunk}" if chunk else f"topk:{density:g}", values)

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `topk:density|values` or `topk:density:chunk|values`."""
        arguments.at_most(2)
        return cls(arguments.share(), *inner, chunk=arguments.whole(0, place=1))

    def _of(self, elements: int) -> int:
        """Return the number of values sent of so many elements that are chosen from together."""
        return max(1, int(elements * self.density + 0.5)) if elements else 0

    def count(self, elements: int) -> int:
        """Return the number of values sent."""
        if not self.chunk:
            return self._of(elements)
        chunks, rest = divmod(elements, self.chunk)
        return chunks * self._of(self.chunk) + self._of(rest)

    def where_bytes(self, elements: int) -> int:
        """Return the bytes of the positions."""
        return positions_bytes(elements, self.count(elements))

    def choose(self, x: Tensor, *, out: Bytes) -> Tensor:
        """Return the values of the largest magnitudes in the order of their positions."""
        elements = x.numel()
        if not elements:
            return torch.empty(0)
        positions = self._in_chunks(x) if self.chunk else largest(x, self.count(elements))
        write_positions(positions, elements=elements, out=out)
        return torch.from_numpy(x.numpy()[positions])

    def _in_chunks(self, x: Tensor) -> Indices:
        """Return the positions of the largest magnitudes of every chunk, ascending."""
        chunk, whole = self.chunk, x.numel() // self.chunk * self.chunk
        rows = max(1, _STRIP // chunk) * chunk
        found = [
            largest_of_rows(x[start : min(start + rows, whole)].view(-1, chunk), self._of(chunk))
            + start
            for start in range(0, whole, rows)
        ]
        if whole < x.numel():
            found.append(largest(x[whole:], self._of(x.numel() - whole)) + whole)
        return np.concatenate(found)

    def where(self, data: Bytes, elements: int) -> Where:
        """Return the positions."""
        return read_positions(data, elements=elements, count=self.count(elements))


def largest(x: Tensor, count: int) -> Indices:
    """Return the positions of the `count` largest magnitudes, ascending; of equal ones the first.

    NaN counts as larger than infinity.
    """
    return largest_of_rows(x.view(1, -1), count)


def largest_of_rows(x: Tensor, count: int) -> Indices:
    """Return the positions of the `count` largest magnitudes of each row, shape (rows * count,).

    They are ascending and count through all rows, shape (rows, width).
    """
    # A float's bits without the sign, as an integer, sort like its magnitude.
    magnitudes = x.numpy().view(np.int32) & _MAGNITUDE
    edge = magnitudes.shape[1] - count
    least = np.partition(magnitudes, edge, axis=1)[:, edge : edge + 1]
    chosen: np.ndarray[Any, np.dtype[np.bool_]] = magnitudes >= least
    surplus = np.count_nonzero(chosen, axis=1) - count
    for row in np.flatnonzero(surplus):
        equal = np.flatnonzero(magnitudes[row] == least[row])
        chosen[row, equal[len(equal) - surplus[row] :]] = False
    return np.flatnonzero(chosen)
