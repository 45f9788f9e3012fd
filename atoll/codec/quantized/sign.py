"""sign: one bit per element, and the mean magnitude of every block as its scale.

  decode: +scale or -scale, scale = mean |x| over the block

That scale minimizes the error of a block: `|x|**2 - n * scale**2`. A zero has no sign and becomes
+scale. The sign without error feedback does not converge on some convex problems; use
`feedback(sign)`.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; the scale: Karimireddy et al. 2019,
section 2 (https://arxiv.org/abs/1901.09847). Differs from these: blocks, not tensors or columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.codec.quantized.blocks import Blocks
from atoll.codec.quantized.integers import safe_mean
from atoll.codec.quantized.packing import Bytes


class Sign(Blocks):
    """One bit per element."""

    name, bits = "sign", 1
    levels = np.array([-1, 1], dtype=np.float32)

    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return the mean magnitudes."""
        return safe_mean(torch.abs(x, out=scratch))

    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write 1 for values that are not negative."""
        np.greater_equal(x.reshape(-1).numpy(), 0.0, out=codes.view(np.bool_))
