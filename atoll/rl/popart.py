"""A value head that keeps its own scale: PopArt, one for each policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BETA = 3e-4
"""Weight of one new target in the running moments: they remember about 3000 steps."""
SMALLEST, LARGEST = 1e-4, 1e6
"""Limits of the deviation by which targets are divided."""


class PopArt(nn.Module):
    """A linear head in normalised units, and the mean and deviation that turn them into rewards.

    The network regresses `(target - mean) / deviation`. When a batch moves the two, weight and bias
    are changed so that every value in reward units stays what it was.

    Args:
        width: Features it reads.
        beta: Weight of one target in the running moments.
    """

    moments: Tensor
    start: Tensor

    def __init__(self, width: int, *, beta: float = BETA) -> None:
        super().__init__()
        self.beta = beta
        self.weight = nn.Parameter(torch.zeros(width + 1))
        """[width + 1]: the last one is the bias."""
        # Sums of weights, of targets and of their squares; double, for a difference of squares.
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))
        # What holds before the first batch: mean and deviation.
        self.register_buffer("start", torch.tensor([0.0, 1.0], dtype=torch.float64))

    @property
    def fresh(self) -> bool:
        """Whether it has not seen any target yet."""
        return float(self.moments[0]) == 0.0

    def scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation, double scalars."""
        if self.fresh:
            return self.start[0], self.start[1]
        mean = self.moments[1] / self.moments[0]
        variance = self.moments[2] / self.moments[0] - mean * mean
        return mean, variance.clamp(min=0.0).sqrt().clamp(SMALLEST, LARGEST)

    @torch.no_grad()
    def observe(self, targets: Tensor, *, weights: Tensor | None = None) -> None:
        """Take a batch of targets into the moments, and keep all values what they were.

        The first batch sets the scale and leaves the weights: nothing has been learned in other
        units that had to be kept, and a head that began as the mean of others keeps its shape.

        Args:
            targets: [N], in reward units.
            weights: [N], how much each counts; None: all the same.
        """
        if not targets.numel():
            return
        exact = targets.double()
        part = torch.ones_like(exact) if weights is None else weights.double()
        part = part / part.sum()
        before, fresh = self.scale(), self.fresh
        keep = (1.0 - self.beta) ** targets.numel()
        added = torch.stack([part.sum(), (part * exact).sum(), (part * exact * exact).sum()])
        self.moments.mul_(keep).add_(added, alpha=1.0 - keep)
        if not fresh:
            self._preserve(*before)

    def _preserve(self, mean: Tensor, deviation: Tensor) -> None:
        """Change weight and bias from the units given to those of now."""
        new_mean, new_deviation = self.scale()
        exact = self.weight.double() * (deviation / new_deviation)
        exact[-1] += (mean - new_mean) / new_deviation
        self.weight.copy_(exact)

    @torch.no_grad()
    def begin_like(self, others: list[PopArt]) -> None:
        """Begin as the mean of other heads, in normalised units."""
        if others:
            self.weight.copy_(torch.stack([other.weight for other in others]).mean(0))
            scales = [torch.stack(other.scale()) for other in others]
            self.start.copy_(torch.stack(scales).mean(0))
