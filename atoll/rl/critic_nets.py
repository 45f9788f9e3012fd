"""The network of values: encoders, a trunk for all, and for each policy an embedding and a head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.rl.norm import RunningNorm
from atoll.rl.popart import PopArt

EMBEDDING = 8
"""Numbers in the embedding of a policy."""


class Encoder(nn.Module):
    """Reads one kind of observation: its running normalisation and the first layer.

    Args:
        features: Numbers in one flat observation.
        width: Width of the first layer.
        generator: Draws the first weights.
    """

    def __init__(self, features: int, width: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = RunningNorm((features,))
        self.linear = _linear(features, width, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what normalised inputs [N, features] are before the activation, [N, width]."""
        out: Tensor = self.linear(inputs)
        return out


class ValueNet(nn.Module):
    """Values of many policies in one network.

    Conditioned, the embedding of a policy is read beside the observation, and the policy has a
    head of its own. The embeddings differ much from the start: the trunk then has features of each
    policy as well as common ones. Unconditioned, nothing tells the network whose value is asked:
    there is one head, with one scale.

    Args:
        hidden: Widths of the trunk; the first one is the encoders'.
        conditioned: Whether it is told whose value is asked.
        generator: Draws the first weights.

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
        """Add a head, which begins as the mean of those there are; return its index.

        Nobody else's values change.
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
        """Return how a new policy begins: the mean of the others, or drawn for the first ones."""
        drawn = torch.randn(EMBEDDING, generator=self.generator)
        trained = [
            embedding.detach()
            for embedding, head in zip(self.embeddings, self.all_heads(), strict=False)
            if not head.fresh
        ]
        return torch.stack(trained).mean(0) if trained else drawn

    def forward(
        self, inputs: Sequence[Tensor | None], asked: Sequence[int], which: Tensor
    ) -> Tensor:
        """Return values in each head's normalised units.

        Args:
            inputs: For each encoder its flat observations [N_e, features], normalised, or None.
            asked: Heads whose values are asked for; the others get no gradient at all, so that
                the optimizer leaves them alone.
            which: [N], for each row the place of its head in `asked`, in order of encoders.

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
            # What a layer over [observation, embedding] would do, for each policy only once.
            told = self.tell(torch.stack([self.embeddings[index] for index in asked]))
            out = out + told.index_select(0, which)
        out = torch.tanh(out)
        for layer in self.trunk:
            out = torch.tanh(layer(out))
        heads = self.all_heads()
        weights = torch.stack([heads[index].weight for index in asked])
        answers = torch.addmm(weights[:, -1], out, weights[:, :-1].T)
        return answers.gather(1, which[:, None])[:, 0]

    def scales(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each head, [heads] double each."""
        both = [head.scale() for head in self.all_heads()]
        return torch.stack([mean for mean, _ in both]), torch.stack([dev for _, dev in both])


def _linear(
    features: int, width: int, *, generator: torch.Generator, gain: float = math.sqrt(2.0)
) -> nn.Linear:
    """Return a layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(features, width, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        layer.bias.zero_()
    return layer
