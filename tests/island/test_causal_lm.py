"""A model of `transformers` under every inner strategy: the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.models import build_model
from tests.island.pool import Ranks
from tests.island.reference import assert_same, divided, gradients
from tests.island.tensor.cases import family
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


# ------------------------------------------------------------- families and their tensor plans

FAMILIES = (
    "cohere", "gemma", "glm", "glm4", "gpt_neox", "granite", "helium", "llama", "mistral", "olmo",
    "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2",
)  # fmt: skip


def _family(kind: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(3)
    config = family(kind, vocab_size=12)
    model = stirred(build_model("transformers", config=config, context=8)).double()
    ids = torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(5))
    return model, ids[:, :-1], ids[:, 1:]


def _families() -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for kind in FAMILIES:
        model, inputs, targets = _family(kind)
        parts = divided(model, {"tensor": 2})
        assert any(
            p.shape != w.shape for p, w in zip(_local(parts), model.parameters(), strict=True)
        )
        found.append((float(parts.backward(inputs, targets)), gradients(parts)))
    return found


def _local(parts: Any) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p) for p in parts.parameters().values()]


def test_tensor_ranks_have_the_gradients_of_one_device(ranks: Ranks) -> None:
    first, second = ranks.run(2, _families)
    for kind, (loss, some), (other, others) in zip(FAMILIES, first, second, strict=True):
        model, inputs, targets = _family(kind)
        expected = model.loss(inputs, targets)
        expected.backward()
        assert loss == other == pytest.approx(expected.item(), rel=1e-12), kind
        for found in (some, others):
            assert_same(found, {name: p.grad for name, p in model.named_parameters()})
