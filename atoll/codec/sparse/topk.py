"""topk: send the share of elements with the largest magnitudes.

A mean of sparse vectors is less sparse, so members all-gather the packets and add them up. Of equal
magnitudes the first ones are taken; a non-finite value counts as the largest. The other values are
lost unless the codec is used in `feedback(...)`.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; with error feedback:
Stich et al. 2018 (https://arxiv.org/abs/1809.07599). Differs from both: over the whole vector, not
per tensor, and without sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.quantized.packing import Bytes
from atoll.codec.sparse.positions import positions_bytes, read_positions, write_positions
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.selecting import Selecting, Where, check_density

_MAGNITUDE = np.int32(0x7FFF_FFFF)


class TopK(Selecting):
    """The largest magnitudes, at least one.

    Raises:
        ConfigError: `density` (share of the elements sent) is not above 0 and at most 1.
    """

    needs_allgather = True

    def __init__(self, density: float, values: Codec) -> None:
        self.density = check_density("topk", density)
        super().__init__(f"topk:{density:g}", values)

    @classmethod
    def from_spec(cls, given: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `topk:density|values`."""
        given.at_most(1)
        return cls(given.share(), *inner)

    def count(self, elements: int) -> int:
        """Return the number of values sent."""
        return max(1, int(elements * self.density + 0.5)) if elements else 0

    def where_bytes(self, elements: int) -> int:
        """Return the bytes of the positions."""
        return positions_bytes(elements, self.count(elements))

    def choose(self, x: Tensor, *, out: Bytes) -> Tensor:
        """Return the values of the largest magnitudes in the order of their positions."""
        elements, count = x.numel(), self.count(x.numel())
        if not elements:
            return torch.empty(0)
        positions = largest(x, count)
        write_positions(positions, elements=elements, out=out)
        return torch.from_numpy(x.numpy()[positions])

    def where(self, data: Bytes, elements: int) -> Where:
        """Return the positions."""
        return read_positions(data, elements=elements, count=self.count(elements))


def largest(x: Tensor, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions of the `count` largest magnitudes, ascending; of equal ones the first.

    NaN counts as larger than infinity.
    """
    # A float's bits without the sign, as an integer, sort like its magnitude.
    magnitudes = x.numpy().view(np.int32) & _MAGNITUDE
    least = np.partition(magnitudes, len(magnitudes) - count)[-count:].min()
    chosen = magnitudes > least
    missing = count - int(np.count_nonzero(chosen))
    chosen[np.flatnonzero(magnitudes == least)[:missing]] = True
    return np.flatnonzero(chosen)
