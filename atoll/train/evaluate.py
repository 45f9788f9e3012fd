"""Held-out loss of the common parameters, alone or dealt out over the members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atoll.data import HeldOut

EVALUATION_BATCH = 64
"""Sequences per forward pass; larger batches leave a small core's cache."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a member found on its share; sums, so that shares can be added."""

    loss_sum: float
    """Nats over all tokens of the share."""
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")


@torch.no_grad()
def evaluate(
    model: Any,
    held_out: HeldOut,
    *,
    context: int,
    limit_tokens: int | None = None,
    share: int = 0,
    shares: int = 1,
) -> Evaluation:
    """Return the loss of a model on every `shares`-th batch of the held-out text.

    Shares 0 to `shares - 1` together see every batch once. The model MUST carry the common
    parameters, so this is called right after a round.

    Args:
        model: Has a `loss(inputs, targets)` that returns nats per token.
        held_out: The text.
        context: Length of a sequence.
        limit_tokens: About how many tokens all shares see together; all by default.
        share: Which share.
        shares: How many there are.
    """
    was_training = model.training
    model.eval()
    loss_sum, tokens = 0.0, 0
    batches = held_out.batches(context=context, batch=EVALUATION_BATCH, limit_tokens=limit_tokens)
    for index, (inputs, targets) in enumerate(batches):
        if index % shares == share:
            loss_sum += float(model.loss(inputs, targets)) * targets.numel()
            tokens += targets.numel()
    model.train(was_training)
    return Evaluation(loss_sum, tokens)
