"""Held-out loss of the common parameters, alone or dealt out over the members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.data import HeldOutBatches

EVALUATION_BATCH = 64
"""Samples per forward pass; larger batches leave a small core's cache."""

LossOfBatch = Callable[[Tensor, Tensor], Tensor]
"""Returns the mean loss of inputs and targets; without gradients."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a member found on its share; sums, so that shares can be added."""

    loss_sum: float
    """Nats over all tokens of the share."""
    tokens: int
    """Targets of the share: tokens of text, or samples that were classified."""
    correct: int | None = None
    """Of them given the highest chance; None where not every sample has one class."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")

    @property
    def accuracy(self) -> float | None:
        """Share of the samples that were classified rightly."""
        return None if self.correct is None or not self.tokens else self.correct / self.tokens


@torch.no_grad()
def evaluate(
    model: Any,
    batches: HeldOutBatches,
    *,
    limit_tokens: int | None = None,
    share: int = 0,
    shares: int = 1,
    loss_of: LossOfBatch | None = None,
) -> Evaluation:
    """Return the loss of a model on every `shares`-th batch of what is held out.

    Shares 0 to `shares - 1` together see every batch once. The model MUST carry the common
    parameters, so this is called right after a round.

    Args:
        model: A `Trainable`; classifiers (targets of one class per sample) tell how often they
            are right, too.
        batches: What is held out.
        limit_tokens: About how many targets all shares see together; all by default.
        share: Which share.
        shares: How many there are.
        loss_of: Computes the loss where `model` itself does not; it tells no accuracy.
    """
    was_training = model.training
    model.eval()
    loss_sum, tokens, correct = 0.0, 0, None
    for index, (inputs, targets) in enumerate(
        batches(batch=EVALUATION_BATCH, limit_tokens=limit_tokens)
    ):
        if index % shares != share:
            continue
        tokens += targets.numel()
        if loss_of is None and targets.dim() == 1:
            outputs = model(inputs)
            loss = model.criterion(outputs, targets)
            correct = (correct or 0) + int((outputs.argmax(dim=-1) == targets).sum())
        else:
            loss = (loss_of or model.loss)(inputs, targets)
        loss_sum += float(loss) * targets.numel()
    model.train(was_training)
    return Evaluation(loss_sum, tokens, correct)
