"""QSGD: stochastic rounding to 2*s+1 levels, so that the expected value is exact.

  q = norm * sign(x) * k / s,  k = floor(s*|x|/norm + u),  u uniform in [0, 1)

The norm is the L2 norm of a block of 256 elements. E[q] = x, and the variance of a block of d
elements is at most `min(d/s**2, sqrt(d)/s) * norm**2`. Because it is unbiased it needs no error
feedback: the noise averages out over members and rounds.

Codes take 2 bits for s = 1, 4 bits up to s = 7 and 8 bits up to s = 127. The random numbers depend
on the round, the key and the values: runs are bitwise reproducible, and two members draw different
numbers without knowing their rank.

Alistarh et al. 2017, section 3.1 (https://arxiv.org/abs/1610.02132). Differs from the paper: codes
have a fixed length, not Elias coding, so that a packet's size is known in advance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.quantized.blocks import DEFAULT_BLOCK, Blocks
from atoll.codec.quantized.packing import Bytes
from atoll.codec.seeds import mixed
from atoll.codec.spec import Arguments
from atoll.errors import ConfigError

DEFAULT_LEVELS = 127
_BITS = ((1, 2), (7, 4), (127, 8))
"""Largest number of levels, and the bits per code."""


class QSGD(Blocks):
    """Stochastic rounding; see the module's docstring.

    Raises:
        ConfigError: `levels` (steps between zero and the norm) is not 1 to 127.
    """

    name, upwards = "qsgd", True

    def __init__(self, levels: int = DEFAULT_LEVELS) -> None:
        if not 1 <= levels <= _BITS[-1][0]:
            raise ConfigError(
                "the levels of codec qsgd are out of range",
                given=levels, expected="1 to 127", remedy=f"qsgd:{DEFAULT_LEVELS}",
            )  # fmt: skip
        self.steps = levels
        self.bits = next(bits for most, bits in _BITS if levels <= most)
        codes = np.arange(2**self.bits, dtype=np.float32) - levels
        self.levels = np.clip(codes, -levels, levels).astype(np.float32)
        super().__init__(DEFAULT_BLOCK)
        self.spec = f"qsgd:{levels}"
        self._round = 0

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `qsgd:levels`."""
        arguments.at_most(1)
        return cls(arguments.whole(DEFAULT_LEVELS))

    def set_round(self, round_: int) -> None:
        """Set the round, which seeds the random numbers."""
        self._round = round_

    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return the norms over the number of levels, computed without overflow."""
        largest = torch.amax(torch.abs(x, out=scratch), dim=1, keepdim=True)
        scratch.div_(largest.clamp(min=torch.finfo(torch.float32).tiny))
        norm = largest[:, 0] * torch.linalg.vector_norm(scratch, dim=1)
        finite = torch.isfinite(largest[:, 0])
        norm.clamp_(max=torch.finfo(torch.float32).max)
        return torch.where(finite, norm / self.steps, torch.nan)

    def noise(self, x: Tensor, *, key: str) -> np.random.Generator:
        """Return the vector's generator, seeded by the round, the key and all its bits."""
        total = int(x.numpy().view(np.int32).sum(dtype=np.int64))
        return np.random.Generator(np.random.SFC64(mixed(self._round, key, total)))

    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write one of the two adjacent levels for every element, the nearer one more often."""
        assert noise is not None  # from `noise` above
        scaled = torch.div(x, divisors, out=scratch).view(-1).numpy()
        scaled += noise.random(scaled.size, dtype=np.float32)
        np.floor(scaled, out=scaled)
        scaled += np.float32(self.steps)
        np.clip(scaled, 0, 2 * self.steps, out=scaled)
        torch.from_numpy(codes).copy_(scratch.view(-1))
