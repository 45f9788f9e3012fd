from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.checkpoint.format.nested import flatten, nest
from atoll.config import TrainTable, dump_spec, parse_spec, read_spec
from atoll.errors import ConfigError
from atoll.models import GPT, GPTConfig
from atoll.models.gpt2 import GPT2, GPT2Config
from atoll.strategies.inner.model_facts import hidden_matrices
from atoll.train.optim.muon import muon
from atoll.train.optim.optimizers import (
    StepSchedule,
    build_optimizer,
    learning_rate,
    torch_optimizers,
)


def tiny_gpt() -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(layers=1, width=16, heads=2, context=8))


def backward(model: GPT, step: int) -> None:
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model.loss(ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]


def table(optimizer: str, lr: float = 0.01, **options: Any) -> TrainTable:
    return TrainTable(optimizer=optimizer, lr=lr, options=options, steps=20, warmup=2)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "torch:RMSprop", "torch:Adagrad"])
def test_every_kind_of_optimizer_learns(name: str) -> None:
    model = tiny_gpt()
    optimizer = build_optimizer(model, table(name))
    losses = []
    for _ in range(12):
        ids = torch.arange(18).reshape(2, 9) % 7
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1


def test_torchs_gradient_optimizers_can_be_named() -> None:
    assert {"AdamW", "SGD", "RMSprop", "Adagrad", "Adafactor", "Rprop"} <= set(torch_optimizers())
    assert "LBFGS" not in torch_optimizers()
    assert "Optimizer" not in torch_optimizers()


def test_options_reach_torchs_optimizer_and_only_matrices_decay() -> None:
    optimizer = build_optimizer(tiny_gpt(), table("torch:RMSprop", alpha=0.5, centered=True))
    assert type(optimizer) is torch.optim.RMSprop
    assert [group["alpha"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert build_optimizer(tiny_gpt(), table("adamw", eps=1e-6)).defaults["eps"] == 1e-6


@pytest.mark.parametrize(
    ("optimizer", "options", "meant"),
    [
        ("torch:RMSpop", {}, "did you mean 'RMSprop'"),
        ("torch:LBFGS", {}, "unknown optimizer of torch"),
        ("torch:RMSprop", {"alfa": 0.5}, "did you mean 'alpha'"),
        ("torch:RMSprop", {"alpha": -1.0}, "refuses its options.*alpha"),
        ("torch:Muon", {}, "refuses its options.*2D"),
        ("muon", {"ns_step": 3}, "did you mean 'ns_steps'"),
        ("adamw", {"weight_decay": 1.0}, "unknown key in .train.options."),
        ("moun", {}, "did you mean 'muon'"),
    ],
)
def test_bad_names_and_options_are_refused_with_the_nearest(
    optimizer: str, options: dict[str, Any], meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(tiny_gpt(), table(optimizer, **options))
    assert re.search(meant, " ".join(str(caught.value).split())), caught.value


def test_a_job_file_names_the_optimizer_and_its_options() -> None:
    text = '[train]\noptimizer = "torch:RMSprop"\n[train.options]\nalpha = 0.9\ncentered = true\n'
    spec = parse_spec(text)
    assert spec.train.options == {"alpha": 0.9, "centered": True}
    assert parse_spec(dump_spec(spec)) == spec
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        read_spec({"train": {"optimizer": "adam"}})
    with pytest.raises(ConfigError, match=r"options in .train. has the wrong type"):
        read_spec({"train": {"options": 3}})


# ---------------------------------------------------------------------------------- Muon


def test_newton_schulz_gives_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(4)
    for rows, columns in ((96, 24), (24, 96), (64, 16)):
        model = nn.Linear(columns, rows, bias=False)
        weight = model.weight
        before = weight.detach().clone()
        optimizer = muon(
            model, lr=1.0, weight_decay=0.0, options={"momentum": 0.0, "nesterov": False}
        )
        weight.grad = torch.randn(rows, columns, generator=generator)
        optimizer.step()
        scale = math.sqrt(max(1.0, rows / columns))
        values = torch.linalg.svdvals((before - weight.detach()) / scale)
        assert float(values.min()) > 0.65, values
        assert float(values.max()) < 1.25, values


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = tiny_gpt()
    hidden = {id(p) for p in hidden_matrices(model)}
    names = {name for name, p in model.named_parameters() if id(p) in hidden}
    assert names == {
        f"blocks.0.{part}.weight" for part in ("queries_keys_values", "merge", "up", "down")
    }
    optimizer = build_optimizer(model, table("muon", lr=0.02, adamw_lr=0.001))
    backward(model, 0)
    optimizer.step()
    kinds = {
        name: sorted(optimizer.state[parameter]) for name, parameter in model.named_parameters()
    }
    for name, kind in kinds.items():
        assert kind == (["momentum_buffer"] if name in names else ["exp_avg", "exp_avg_sq", "step"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(kinds)


@pytest.mark.parametrize("tie", [True, False])
def test_hidden_matrices_may_be_as_wide_as_a_table_is_long(*, tie: bool) -> None:
    model = GPT2(GPT2Config(layers=2, width=64, context=64, vocab_size=256, tie=tie))
    hidden = {id(p) for p in hidden_matrices(model)}
    found = {name for name, p in model.named_parameters() if id(p) in hidden}
    assert found == {n for n, p in model.blocks.named_parameters(prefix="blocks") if p.dim() == 2}


def test_muon_has_nadam_beside_it_if_the_job_says_so() -> None:
    model = tiny_gpt()
    optimizer = build_optimizer(model, table("muon", lr=0.02, rest="nadam"))
    backward(model, 0)
    optimizer.step()
    assert "mu_product" in optimizer.state[model.embedding.weight]  # NAdam's
    assert optimizer.param_groups[-1]["lr"] == pytest.approx(0.004)
    with pytest.raises(ConfigError, match=r"nadan[\s\S]*nadam"):
        build_optimizer(tiny_gpt(), table("muon", lr=0.02, rest="nadan"))


def test_a_schedule_keeps_the_ratio_of_the_two_rates() -> None:
    settings = table("muon", lr=0.02, adamw_lr=0.004)
    optimizer = build_optimizer(tiny_gpt(), settings)
    schedule = StepSchedule(optimizer, learning_rate(settings))
    for _ in range(5):
        schedule.step()
        first, *others = [group["lr"] for group in optimizer.param_groups]
        assert first == pytest.approx(schedule.rate)
        assert others == [pytest.approx(schedule.rate / 5)] * len(others)


def test_a_model_without_hidden_matrices_is_refused_for_muon() -> None:
    with pytest.raises(ConfigError, match="no hidden matrix"):
        muon(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4)))


@pytest.mark.parametrize("through_a_checkpoint", [False, True])
def test_saved_and_loaded_muon_goes_on_bit_for_bit(*, through_a_checkpoint: bool) -> None:
    settings = table("muon", lr=0.02)

    def train(model: GPT, optimizer: torch.optim.Optimizer, start: int, end: int) -> None:
        for step in range(start, end):
            backward(model, step)
            optimizer.step()

    def vector(model: GPT) -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = tiny_gpt()
    train(whole, build_optimizer(whole, settings), 0, 8)
    half = tiny_gpt()
    first = build_optimizer(half, settings)
    train(half, first, 0, 4)
    saved = copy.deepcopy(first.state_dict())
    if through_a_checkpoint:
        tensors, text = flatten(saved, prefix="optimizer")
        saved = dict(nest(text, {name: value.clone() for name, value in tensors.items()}))
    again = copy.deepcopy(half)
    second = build_optimizer(again, settings)
    second.load_state_dict(saved)
    train(again, second, 4, 8)
    assert torch.equal(vector(whole), vector(again))
    assert not torch.equal(vector(whole), vector(half))
