"""e3m0 and fp8: small floating-point formats, scaled to use their whole range in each block.

e3m0, 4 bits: a sign and three bits of exponent, no mantissa: 0 and the powers 2**0..2**6, times a
scale of a 64th of the block's largest magnitude. The nearest level is chosen, with the threshold at
the arithmetic midpoint and ties away from zero, so that the error of an element is at most a third
of the element, as long as it is above the smallest level.

  code    0  1  2  3  4   5   6   7     8 + code: the negative value
  level   0  1  2  4  8  16  32  64

fp8, 8 bits: e4m3 without infinities (sign, 4 bits of exponent, 3 of mantissa, largest 448), times a
448th of the largest magnitude: an error of at most 1/16 of the element down to 2e-5 of the largest
magnitude, where int8 has an even error over the whole block.

e3m0 on the wire: Douillard et al. 2025, "Streaming DiLoCo", section 2.3
(https://arxiv.org/abs/2501.18512); the layout of the scales differs. e4m3: Micikevicius et al. 2022
(https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.codec.quantized.blocks import Blocks
from atoll.codec.quantized.packing import Bytes, Floats

_POWERS = np.array([0, 1, 2, 4, 8, 16, 32, 64], dtype=np.float32)
_HALF_MANTISSA = 1 << 22
"""Added to a float's bits, it carries into the exponent from 1.5 times a power of two on."""


def _e4m3() -> Floats:
    """Return the value of every e4m3 code, shape (256,)."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values: Floats = codes.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    return values


class E3M0(Blocks):
    """Powers of two in half a byte."""

    name, bits = "e3m0", 4
    levels = np.concatenate([_POWERS, -_POWERS])

    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return a 64th of the largest magnitudes."""
        return torch.amax(torch.abs(x, out=scratch), dim=1).div_(64.0)

    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write the nearest level's code."""
        scaled = torch.div(x, divisors, out=scratch).view(-1).numpy()
        negative = np.signbit(scaled)
        np.abs(scaled, out=scaled)
        # From 0.5 on a value is nearer to 1 than to 0.
        one = scaled >= np.float32(0.5)
        exponents = scaled.view(np.int32)
        exponents += _HALF_MANTISSA
        exponents >>= 23
        exponents -= 126
        np.clip(exponents, one, 7, out=exponents)
        exponents |= negative.astype(np.int32) << 3
        torch.from_numpy(codes).copy_(torch.from_numpy(exponents))


class BlockwiseFp8(Blocks):
    """e4m3 with the block's largest magnitude as 448."""

    name, bits = "fp8", 8
    levels = _e4m3()

    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return a 448th of the largest magnitudes."""
        return torch.amax(torch.abs(x, out=scratch), dim=1).div_(448.0)

    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write the nearest number, half to even."""
        scaled = torch.div(x, divisors, out=scratch).clamp_(-448.0, 448.0)
        torch.from_numpy(codes).view(torch.float8_e4m3fn).copy_(scaled.view(-1))
