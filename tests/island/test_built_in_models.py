"""Every built-in model under data parallelism: the gradients of one device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from atoll.models import build_model
from tests.island.pool import Ranks
from tests.island.reference import assert_same, divided, gradients

TEXT = {"vocab_size": 18, "width": 16, "heads": 2, "context": 6}
BUILT: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": TEXT,
        "llama": {**TEXT, "kv_heads": 1},
        "resnet": {"width": 4, "groups": 2, "classes": 3},
        "vit": {"image": 8, "width": 16, "heads": 2, "layers": 2, "classes": 3},
    }
)


def _model_and_batch(name: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(3)
    model: Any = build_model(name, **BUILT[name]).double()
    with torch.no_grad():  # what starts at zero would hide the rest
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if "context" in BUILT[name]:
        ids = torch.randint(18, (8, 7))
        return model, ids[:, :-1], ids[:, 1:]
    images = torch.randn(8, 1, 8, 8, dtype=torch.float64)
    return model, images, torch.randint(3, (8,))


def _divided(
    name: str, settings: list[tuple[dict[str, int], dict[str, Any]]]
) -> list[tuple[float, dict[str, Tensor], int]]:
    """Return loss, gradients and separately gathered units under each setting."""
    found = []
    for axes, words in settings:
        model, inputs, targets = _model_and_batch(name)
        parts = divided(model, axes, **words)
        loss = float(parts.backward(inputs, targets))
        gathered = sum(isinstance(module, FSDPModule) for module in model.modules())
        found.append((loss, gradients(parts), gathered))
    return found


@pytest.mark.parametrize("name", list(BUILT))
def test_gradients_equal_those_of_one_device(ranks: Ranks, name: str) -> None:
    model, inputs, targets = _model_and_batch(name)
    expected_loss = model.loss(inputs, targets)
    expected_loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    settings: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"replicate": 2}, {"accumulate": 2}),
        ({"shard": 2}, {"recompute": "full"}),
    ]
    for copied, sharded in ranks.run(2, _divided, name, settings):
        for loss, found, _ in (copied, sharded):
            assert loss == pytest.approx(expected_loss.item(), rel=1e-12)
            assert_same(found, expected)
        assert copied[2] == 0
        assert sharded[2] > 2  # unit by unit, not all at once
