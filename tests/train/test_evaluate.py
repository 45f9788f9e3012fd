"""The held-out loss is finite, and the model comes back in its mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.models import GPT, GPTConfig
from atoll.strategies.inner.local import IGNORED
from atoll.train.evaluate import evaluate


def gpt() -> GPT:
    return GPT(GPTConfig(layers=1, width=16, heads=2, context=8))


class Two:
    """Two batches; all targets of the second are ignored."""

    bytes_per_token = None

    def __call__(self, **_: Any) -> Iterator[tuple[Tensor, Tensor]]:
        ids = torch.arange(16).reshape(2, 8)
        yield ids, ids
        yield ids, torch.full_like(ids, IGNORED)


def test_a_batch_of_ignored_targets_does_not_count() -> None:
    found = evaluate(gpt(), Two())
    assert found.tokens == 16
    assert 0.0 < found.loss < 20.0


def test_a_failed_evaluation_leaves_the_model_training() -> None:
    model = gpt().train()

    def fails(inputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        evaluate(model, Two(), loss_of=fails)
    assert model.training
