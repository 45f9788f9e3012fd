"""Held-out loss of the common parameters, computed by one member or in shares by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.data import HeldOutBatches
from atoll.devices.choose import device_of_model
from atoll.devices.transfer import placed
from atoll.models.language import evaluating
from atoll.strategies.inner.local import count_correct, count_targets

EVALUATION_BATCH = 64
"""Samples per forward pass; larger batches leave a small core's cache."""

LossOfBatch = Callable[[Tensor, Tensor], Tensor]
"""Return the mean loss of inputs and targets; without gradients."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One member's share of an evaluation, as sums: shares can be added."""

    loss_sum: float
    """Nats, summed over all targets of the share."""
    tokens: int
    """Number of targets: tokens of text, or classified samples."""
    correct: int | None = None
    """Number classified correctly; None if samples do not have one class each."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")

    @property
    def accuracy(self) -> float | None:
        """The fraction of samples that were classified correctly."""
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
    """Return the loss of a model on every `shares`-th held-out batch.

    Shares 0 to `shares - 1` together cover every batch once. The model MUST carry the common
    parameters, so call this right after a round.

    Args:
        model: A `Trainable`; a classifier (one class per sample) also reports accuracy.
        batches: The held-out batches.
        limit_tokens: Approximate number of targets over all shares; all by default.
        share: Index of this share.
        shares: Number of shares.
        loss_of: Computes the loss in place of `model`; then no accuracy is reported.
    """
    device = device_of_model(model)
    loss_sum, tokens, correct = 0.0, 0, None
    with evaluating(model):
        for index, (inputs, targets) in enumerate(
            batches(batch=EVALUATION_BATCH, limit_tokens=limit_tokens)
        ):
            if index % shares != share:
                continue
            counted = count_targets(targets)
            tokens += counted
            if loss_of is None:
                inputs, targets = placed((inputs, targets), device)
            if loss_of is None and targets.dim() == 1:
                outputs = model(inputs)
                loss = model.criterion(outputs, targets)
                correct = (correct or 0) + count_correct(outputs, targets)
            else:
                loss = (loss_of or model.loss)(inputs, targets)
            if counted:  # the mean over no targets is NaN
                loss_sum += float(loss) * counted
    return Evaluation(loss_sum, tokens, correct)
