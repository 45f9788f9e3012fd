"""Running mean and deviation of observations, by which they are normalised.

Batches are merged by the pairwise formula of Chan, Golub and LeVeque, in double precision, so the
result is that of all observations at once within rounding, however they were cut into batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CLIP = 10.0
"""Normalised observations lie within plus and minus this."""
EPSILON = 1e-8
"""Added to the variance: a number that never changed must not become infinite."""


class RunningNorm(nn.Module):
    """Normalises observations of one shape by what has been seen of them so far.

    Args:
        shape: Shape of one observation.
    """

    mean: Tensor
    """[*shape], float64."""
    variance: Tensor
    """[*shape], float64: of all observations, not the unbiased one."""
    count: Tensor
    """Scalar, float64: observations seen; while it is 0 they are only clipped."""
    _shift: Tensor
    _deviation: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # What `forward` needs, derived: it runs at every step of an environment.
        self.register_buffer("_shift", torch.zeros(shape), persistent=False)
        self.register_buffer("_deviation", torch.ones(shape), persistent=False)
        self.register_load_state_dict_post_hook(_refresh)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Take observations into account.

        Args:
            observations: [..., *shape], not normalised, all finite.
        """
        batch = observations.to(torch.float64).reshape(-1, *self.mean.shape)
        if not len(batch):
            return
        mean, variance = batch.mean(0), batch.var(0, unbiased=False)
        total = self.count + len(batch)
        share, change = len(batch) / total, mean - self.mean
        self.variance.lerp_(variance, share).add_(change.square() * share * (1.0 - share))
        self.mean.add_(change * share)
        self.count.copy_(total)
        _refresh(self)

    def forward(self, observations: Tensor) -> Tensor:
        """Return observations [..., *shape] normalised, float32."""
        return normalised(observations, self._shift, self._deviation)

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return copies of the mean and the deviation, each [*shape], float32.

        `normalised` with them gives now and later what `forward` gives now.
        """
        return self._shift.clone(), self._deviation.clone()


def normalised(observations: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return observations [..., *shape] with mean 0 and deviation 1, clipped, float32."""
    return observations.float().sub(mean).div_(deviation).clamp_(-CLIP, CLIP)


@torch.no_grad()
def _refresh(norm: nn.Module, _: Any = None) -> None:
    """Derive what `forward` uses from the buffers that are saved."""
    assert isinstance(norm, RunningNorm)
    if norm.count == 0:
        norm._shift.zero_()
        norm._deviation.fill_(1.0)
        return
    norm._shift.copy_(norm.mean)
    norm._deviation.copy_((norm.variance + EPSILON).sqrt())
