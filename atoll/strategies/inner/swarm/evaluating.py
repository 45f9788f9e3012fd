"""The forward pass of one stage on held-out rows: nothing is kept, counted or changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atoll.strategies.inner.local import count_correct, count_targets
from atoll.strategies.inner.pipeline.cuts import as_tuple
from atoll.strategies.inner.precision import widened
from atoll.strategies.inner.swarm.stage import ModelStage
from atoll.wire.swarm import HeldOutSum


def hidden_of(stage: ModelStage, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a stage other than the last, (rows, ...) each; dropout is off."""
    with torch.no_grad(), _evaluating(stage.module):
        # Its first layer may overwrite its inputs.
        return as_tuple(stage.module(*(value.to(stage.device, copy=True) for value in inputs)))


def measured(stage: ModelStage, inputs: Sequence[Tensor], targets: Tensor) -> HeldOutSum:
    """Return the loss of the last stage on these rows, as `atoll.train.evaluate` computes it."""
    if stage.criterion is None:
        raise ValueError(f"stage {stage.number} is not the last one")
    outputs = [widened(each, stage.cut.precision) for each in hidden_of(stage, inputs)]
    whole: Any = outputs[0] if len(outputs) == 1 else tuple(outputs)
    targets = targets.to(stage.device)
    with torch.no_grad(), _evaluating(stage.module):
        loss = stage.criterion(whole, targets)
    correct = count_correct(whole, targets) if targets.dim() == 1 else -1
    counted = count_targets(targets)  # without any, the mean loss is NaN
    return HeldOutSum(loss.item() * counted if counted else 0.0, counted, correct)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and restore the mode of each part on exit."""
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
