"""What every model of the table promises to its trainer."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.checkpoint import describe, load_weights, save_weights
from atoll.errors import ConfigError
from atoll.models import IMAGES, MODELS, build_model

TINY_LLAMA: dict[str, object] = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 16, "tie_word_embeddings": True, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

SMALL: dict[str, dict[str, object]] = {
    "gpt": {"vocab_size": 11, "layers": 2, "width": 16, "heads": 2, "context": 8},
    "gpt2": {"vocab_size": 11, "layers": 2, "width": 16, "heads": 2, "context": 8},
    "llama": {"vocab_size": 11, "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 8},
    "resnet": {"classes": 4, "blocks": 1, "width": 8, "groups": 4},
    "transformers": {"config": TINY_LLAMA, "context": 8},
    "vit": {"classes": 4, "image": 8, "patch": 4, "layers": 2, "width": 16, "heads": 2},
}

names = pytest.mark.parametrize("name", sorted(MODELS))


def small(name: str, **options: object) -> Any:
    torch.manual_seed(3)
    return build_model(name, **(SMALL[name] | options))


def stirred(model: Any) -> Any:
    """The model with random weights everywhere: fresh ones have parts that add nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def some_batch(name: str, rows: int = 6) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    if MODELS[name].data == IMAGES:
        images = torch.randn(rows, 1, 8, 8, generator=random)
        return images, torch.arange(rows) % 4
    ids = torch.randint(0, 11, (rows, 9), generator=random)
    return ids[:, :-1], ids[:, 1:]


def test_every_model_has_a_small_one_here() -> None:
    assert set(SMALL) == set(MODELS)


@names
def test_outputs_have_a_value_per_target_and_class(name: str) -> None:
    inputs, targets = some_batch(name)
    outputs = small(name)(inputs)
    assert outputs.shape[:-1] == targets.shape
    assert outputs.shape[-1] == (4 if MODELS[name].data == IMAGES else 11)


@names
def test_units_one_after_the_other_are_the_forward_pass(name: str) -> None:
    model, (inputs, _) = stirred(small(name)).eval(), some_batch(name)
    x = inputs
    for unit in model.units():
        x = unit(x)
    assert torch.equal(x, model(inputs))


@names
def test_units_are_modules_of_the_model_and_hold_every_parameter(name: str) -> None:
    model = small(name)
    own = set(model.modules())
    assert all(unit in own for unit in model.units())
    held = {id(parameter) for unit in model.units() for parameter in unit.parameters()}
    assert held == {id(parameter) for parameter in model.parameters()}


@names
def test_loss_is_the_criterion_of_the_outputs(name: str) -> None:
    model, (inputs, targets) = stirred(small(name)), some_batch(name)
    assert torch.equal(model.loss(inputs, targets), model.criterion(model(inputs), targets))


@names
def test_every_name_of_the_tensor_plan_exists(name: str) -> None:
    model = small(name)
    modules = [path for path, _ in model.named_modules()]
    for pattern in model.tensor_plan():
        assert fnmatch.filter(modules, pattern), pattern


@names
def test_training_on_one_batch_learns_it(name: str) -> None:
    model, batch = small(name), some_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    first = model.loss(*batch).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 3


@names
def test_same_seed_gives_same_weights(name: str) -> None:
    one, other = small(name).state_dict(), small(name).state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@names
def test_weights_survive_a_file_that_rebuilds_the_model(name: str, tmp_path: Path) -> None:
    model, (inputs, _) = stirred(small(name)).eval(), some_batch(name)
    path = tmp_path / "model.safetensors"
    save_weights(path, model.state_dict(), about=describe(name, options=SMALL[name], tokenizer=""))
    weights = load_weights(path)
    other: Any = build_model(weights.model, **weights.options).eval()
    other.load_state_dict(weights.state)
    assert torch.equal(other(inputs), model(inputs))


@names
def test_model_can_be_laid_out_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = small(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    real = small(name)
    assert [p.shape for p in model.parameters()] == [p.shape for p in real.parameters()]


@names
def test_option_of_the_wrong_kind_is_refused(name: str) -> None:
    option, value = next(iter(SMALL[name].items()))
    kind = type(value).__name__
    with pytest.raises(ConfigError, match=f"'{option}'.*wrong kind.*expected: {kind}"):
        build_model(name, **{option: "2"})


def test_every_model_and_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    rows = {word for line in text.splitlines() if line.startswith("| `") for word in
            re.findall(r"`(\w+)`", line.split(" | ")[0])}  # fmt: skip
    assert set(MODELS) <= rows
    assert {option for row in MODELS.values() for option in row.options} <= rows
