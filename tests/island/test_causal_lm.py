"""A model of `transformers` under every inner strategy: the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.models import build_model
from tests.island.pool import Ranks
from tests.island.reference import assert_same, divided, gradients
from tests.models.test_contract import TINY_LLAMA, stirred

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")

SETTINGS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"replicate": 2}, {"accumulate": 2}),
    ({"shard": 2}, {"recompute": "full"}),
    ({"tensor": 2}, {}),
    ({"pipeline": 2}, {"recompute": "full"}),
]


def _model_and_batch() -> tuple[Any, Tensor, Tensor]:
    config = {**TINY_LLAMA, "vocab_size": 12}
    model = stirred(build_model("transformers", config=config, context=8)).double()
    ids = torch.randint(12, (8, 9), generator=torch.Generator().manual_seed(5))
    return model, ids[:, :-1], ids[:, 1:]


def _steps() -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for axes, words in SETTINGS:
        torch.manual_seed(3)
        model, inputs, targets = _model_and_batch()
        parts = divided(model, axes, **words)
        found.append((float(parts.backward(inputs, targets)), gradients(parts)))
    return found


def test_gradients_equal_those_of_one_device(ranks: Ranks) -> None:
    torch.manual_seed(3)
    model, inputs, targets = _model_and_batch()
    expected_loss = model.loss(inputs, targets)
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    first, second = ranks.run(2, _steps)
    for (axes, _), (loss, some), (other, others) in zip(SETTINGS, first, second, strict=True):
        assert loss == other == pytest.approx(expected_loss.item(), rel=1e-12), axes
        assert_same({**some, **others}, expected)
