"""One network that says what the beginnings of texts are worth, to each of several policies.

A GPT reads the text; the policy that is asked about is added to every token as an embedding, and
has a head with its own scale of rewards (PopArt). That is the conditioned pooling: each policy's
values are of its own behaviour, what the network knows about texts is everybody's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atoll.models import GPT
from atoll.rl.popart import PopArt
from atoll.rl.text.decoding import hidden_states


class ValueModel(nn.Module):
    """Values of texts, token by token.

    Args:
        policies: Names, in an order that everybody shares.
        model: What it starts from; it is copied.
        conditioned: Whether it is told whose value is asked; if not, there is one head.
    """

    def __init__(self, policies: Sequence[str], model: GPT, *, conditioned: bool) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(model).requires_grad_(True).eval()
        self.trunk.head = nn.Identity()  # type: ignore[assignment]  # it writes nothing
        width = model.config.width
        self.conditioned = conditioned
        self.told = nn.Parameter(torch.zeros(len(policies), width))
        self.heads = nn.ModuleList(PopArt(width) for _ in (policies if conditioned else [""]))

    def forward(self, tokens: Tensor, places: Tensor, policies: Tensor) -> Tensor:
        """Return the value before each step in the head's normalised units.

        Args:
            tokens: [B, L], see `Episodes`.
            places: [B, T], see `Episodes`.
            policies: [B], int64: whose value is asked.

        Returns:
            [B, T]; what follows an end means nothing.
        """
        added = self.told[policies] if self.conditioned else None
        states = hidden_states(self.trunk, tokens, added=added)
        states = states.gather(1, places[:, :, None].expand(-1, -1, states.shape[-1]))
        weights = torch.stack([head.weight for head in self.all_heads()])[self.head_of(policies)]
        return torch.einsum("btw,bw->bt", states, weights[:, :-1]) + weights[:, -1:]

    def all_heads(self) -> list[PopArt]:
        """Return the heads in order."""
        return [head for head in self.heads if isinstance(head, PopArt)]

    def head_of(self, policies: Tensor) -> Tensor:
        """Return which head answers for each policy, [B]."""
        return policies if self.conditioned else torch.zeros_like(policies)

    def scales(self, policies: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each one's rewards, [B, 1] float32 each."""
        both = [torch.stack(head.scale()).float() for head in self.all_heads()]
        chosen = torch.stack(both)[self.head_of(policies)]
        return chosen[:, :1], chosen[:, 1:]
