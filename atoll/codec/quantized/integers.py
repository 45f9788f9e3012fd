"""int6, int4 and int2: a few evenly spaced levels per block, in 6, 4 or 2 bits.

int6: the levels -31..31 times a 31st of the block's largest magnitude; fine enough for activations,
which int4 is not.

int4: the levels -7..7 times a seventh of the block's largest magnitude, the nearest one; the error
of an element is at most half a step, 7.2 % of the largest magnitude.

int2: the levels -1, 0, 1 times one magnitude per block. If that were the largest magnitude, nearly
everything would become zero; it is the mean of the magnitudes above 0.7 times the mean magnitude:
within two percent of the optimum for a Gaussian, and for any values no element moves farther from
zero than its nearest level. The fourth code is unused: a symmetric code with a zero does not need
it, and without a zero the zeros of sparse gradients would become noise that error feedback could
never remove.

Linear levels: Dettmers et al. 2021 (https://arxiv.org/abs/2110.02861), with 4 bits and without
their table; the threshold of 0.7 is that of ternary weights, Li, Zhang and Liu 2016, section 2.2
(https://arxiv.org/abs/1605.04711). Both are coarse: use them in `feedback(...)`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.codec.quantized.blocks import Blocks
from atoll.codec.quantized.packing import Bytes

_THRESHOLD = 0.7


def write_rounded(scaled: Tensor, *, limit: float, codes: Bytes) -> None:
    """Write `round(scaled) + limit`, clamped to 0..2*limit; half to even. Overwrites `scaled`."""
    scaled.clamp_(-limit, limit)
    values = scaled.view(-1).numpy()
    # torch.round wakes the thread pool for vectors over 2048 elements: 3 times slower.
    np.rint(values, out=values)
    values += np.float32(limit)
    torch.from_numpy(codes).copy_(scaled.view(-1))


class BlockwiseInt4(Blocks):
    """Integers -7..7, with the block's largest magnitude as 7."""

    name, bits, largest = "int4", 4, 7.0
    levels = np.clip(np.arange(16, dtype=np.float32) - 7, -7, 7).astype(np.float32)

    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return a seventh, or 31st, of the largest magnitudes."""
        return torch.amax(torch.abs(x, out=scratch), dim=1).div_(self.largest)

    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write the nearest level, plus the largest."""
        write_rounded(torch.div(x, divisors, out=scratch), limit=self.largest, codes=codes)


class BlockwiseInt6(BlockwiseInt4):
    """Integers -31..31, with the block's largest magnitude as 31."""

    name, bits, largest = "int6", 6, 31.0
    levels = np.clip(np.arange(64, dtype=np.float32) - 31, -31, 31).astype(np.float32)


class BlockwiseInt2(Blocks):
    """Signs with a zero; see the module's docstring."""

    name, bits = "int2", 2
    levels = np.array([-1, 0, 1, 1], dtype=np.float32)

    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return the mean of the larger magnitudes, see the module's docstring."""
        torch.abs(x, out=scratch)
        mean = safe_mean(scratch)
        large = scratch > _THRESHOLD * mean[:, None]
        count = large.sum(dim=1)
        scratch.mul_(large)
        found = safe_mean(scratch, count=count.clamp_(min=1))
        return torch.where(torch.isfinite(mean), found, torch.nan)

    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write the nearest level, plus 1."""
        write_rounded(torch.div(x, divisors, out=scratch), limit=1.0, codes=codes)


def safe_mean(magnitudes: Tensor, *, count: Tensor | None = None) -> Tensor:
    """Return the mean of every row, shape (rows,); sums beyond float32 are computed in float64.

    `magnitudes`, shape (rows, width), are not negative; `count`, shape (rows,), replaces the width
    as divisor.
    """
    total = magnitudes.sum(dim=1)
    divisor = magnitudes.shape[1] if count is None else count
    if bool(torch.isinf(total).any()):
        return (magnitudes.sum(dim=1, dtype=torch.float64) / divisor).float()
    return total / divisor
