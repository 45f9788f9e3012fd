"""The value network: encoders, a shared trunk, and an embedding and a PopArt head per policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.rl.nets.policy import RunningNorm

BETA = 3e-4
"""Weight of a new target in the running moments, which thus cover about 3000 steps."""
SMALLEST, LARGEST = 1e-4, 1e6
"""Limits of the deviation by which targets are divided."""


class PopArt(nn.Module):
    """A linear value head with its own scale: normalized units, and their mean and deviation.

    The network regresses `(target - mean) / deviation`. When a batch moves these two, weight and
    bias change so that every value in reward units stays the same.

    `beta` is the weight of one target in the running moments.
    """

    moments: Tensor
    start: Tensor

    def __init__(self, width: int, *, beta: float = BETA) -> None:
        super().__init__()
        self.beta = beta
        self.weight = nn.Parameter(torch.zeros(width + 1))
        """[width + 1]: the last one is the bias."""
        # Sums of weights, targets and their squares; double, because squares are subtracted.
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))
        # Mean and deviation before the first batch.
        self.register_buffer("start", torch.tensor([0.0, 1.0], dtype=torch.float64))

    @property
    def fresh(self) -> bool:
        """Whether it has not observed any target yet."""
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
        """Add a batch of targets to the moments, and preserve all values.

        The first batch sets the scale and keeps the weights: no values have been learned that must
        be preserved, and a head that started as the mean of others keeps its shape.

        Args:
            targets: [N], in reward units.
            weights: [N], the weight of each; equal by default.
        """
        if not targets.numel():
            return
        device = self.moments.device
        exact = targets.to(device).double()
        part = torch.ones_like(exact) if weights is None else weights.to(device).double()
        part = part / part.sum()
        before, fresh = self.scale(), self.fresh
        keep = (1.0 - self.beta) ** targets.numel()
        added = torch.stack([part.sum(), (part * exact).sum(), (part * exact * exact).sum()])
        self.moments.mul_(keep).add_(added, alpha=1.0 - keep)
        if not fresh:
            self._preserve(*before)

    def _preserve(self, mean: Tensor, deviation: Tensor) -> None:
        """Convert weight and bias from the given units to the current ones."""
        new_mean, new_deviation = self.scale()
        exact = self.weight.double() * (deviation / new_deviation)
        exact[-1] += (mean - new_mean) / new_deviation
        self.weight.copy_(exact)

    @torch.no_grad()
    def begin_like(self, others: list[PopArt]) -> None:
        """Start as the mean of other heads, in normalized units."""
        if others:
            self.weight.copy_(torch.stack([other.weight for other in others]).mean(0))
            scales = [torch.stack(other.scale()) for other in others]
            self.start.copy_(torch.stack(scales).mean(0))


EMBEDDING = 8
"""Width of a policy's embedding."""


class Encoder(nn.Module):
    """Reads one kind of observation: running normalization and the first layer."""

    def __init__(self, features: int, width: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = RunningNorm((features,))
        self.linear = _linear(features, width, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the pre-activations [N, width] of normalized inputs [N, features]."""
        out: Tensor = self.linear(inputs)
        return out


class ValueNet(nn.Module):
    """Values of many policies in one network.

    Conditioned, the policy's embedding is an input beside the observation, and each policy has a
    head. Embeddings differ strongly from the start, so that the trunk has features of each policy
    and common ones. Unconditioned, the network does not know the policy: there is one head, with
    one scale.

    Args:
        hidden: Widths of the trunk; the first is the encoders' width.
        conditioned: Whether the policy is an input.
        generator: Source of the initial weights.

    Raises:
        ConfigError: there is no hidden layer.
    """

    def __init__(
        self, hidden: Sequence[int], *, conditioned: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        if not hidden:
            raise ConfigError(
                "a critic needs a hidden layer", given="critic_hidden = []",
                expected="at least one width",
            )  # fmt: skip
        self.hidden, self.conditioned, self.generator = tuple(hidden), conditioned, generator
        self.encoders = nn.ModuleList()
        self.trunk = nn.ModuleList(
            _linear(a, b, generator=generator) for a, b in itertools.pairwise(hidden)
        )
        self.embeddings = nn.ParameterList()
        self.heads = nn.ModuleList()
        self.tell: nn.Linear | None = None
        if conditioned:
            self.tell = _linear(EMBEDDING, hidden[0], generator=generator)

    def add_encoder(self, features: int) -> int:
        """Add an encoder for flat observations of `features` numbers; return its index."""
        self.encoders.append(Encoder(features, self.hidden[0], generator=self.generator))
        return len(self.encoders) - 1

    def add_head(self) -> int:
        """Add a head that starts as the mean of the existing ones; return its index.

        The values of other heads do not change.
        """
        head = PopArt(self.hidden[-1])
        head.begin_like(self.all_heads())
        self.heads.append(head)
        if self.conditioned:
            self.embeddings.append(nn.Parameter(self._embedding()))
        return len(self.heads) - 1

    def all_heads(self) -> list[PopArt]:
        """Return the heads in their order."""
        return [head for head in self.heads if isinstance(head, PopArt)]

    def _embedding(self) -> Tensor:
        """Return a new policy's embedding: the mean of the others, or random for the first."""
        drawn = torch.randn(EMBEDDING, generator=self.generator)
        trained = [
            embedding.detach()
            for embedding, head in zip(self.embeddings, self.all_heads(), strict=False)
            if not head.fresh
        ]
        return torch.stack(trained).mean(0) if trained else drawn

    def forward(
        self, inputs: Sequence[Tensor | None], used: Sequence[int], which: Tensor
    ) -> Tensor:
        """Return values in each head's normalized units.

        Args:
            inputs: For each encoder its flat observations [N_e, features], normalized, or None.
            used: The heads in use; the others get no gradient, so the optimizer leaves them alone.
            which: [N], for each row the index of its head in `used`, in order of encoders.

        Returns:
            [N], float32.
        """
        read = [
            encoder(part)
            for encoder, part in zip(self.encoders, inputs, strict=True)
            if part is not None
        ]
        out = read[0] if len(read) == 1 else torch.cat(read)
        if self.tell is not None:
            # Equals a layer over [observation, embedding], computed once per policy.
            projected = self.tell(torch.stack([self.embeddings[index] for index in used]))
            out = out + projected.index_select(0, which)
        out = torch.tanh(out)
        for layer in self.trunk:
            out = torch.tanh(layer(out))
        heads = self.all_heads()
        weights = torch.stack([heads[index].weight for index in used])
        answers = torch.addmm(weights[:, -1], out, weights[:, :-1].T)
        return answers.gather(1, which[:, None])[:, 0]

    def scales(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each head, [heads] double each."""
        both = [head.scale() for head in self.all_heads()]
        return torch.stack([mean for mean, _ in both]), torch.stack([dev for _, dev in both])


def _linear(
    features: int, width: int, *, generator: torch.Generator, gain: float = math.sqrt(2.0)
) -> nn.Linear:
    layer = nn.Linear(features, width, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        layer.bias.zero_()
    return layer
