"""Hooks and schedules of a wrapped optimizer are those of the bare one; see test_torch_own.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import SWALR

from atoll.strategies.wrapped_optimizer import KEY

pytest.importorskip("expecttest", reason="torch's own tests need it: pip install 'atoll[dev]'")
from tests.train.optim.torch_own import (
    CLOSURELESS,
    EVERY,
    INFOS,
    METHODS,
    PAIRS,
    Pair,
    dense,
    train,
)  # fmt: skip


@pytest.mark.parametrize(("info", "method"), PAIRS)
def test_hooks_around_steps_run_once_and_in_order(info: Any, method: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info, method)
    called: list[tuple[str, Any]] = []
    handles = [
        pair.wrapped.register_step_pre_hook(lambda o, args, kwargs: called.append(("before", o))),
        pair.wrapped.register_step_post_hook(lambda o, args, kwargs: called.append(("after", o))),
        pair.inner.register_step_pre_hook(lambda o, args, kwargs: called.append(("in", o))),
        pair.inner.register_step_post_hook(lambda o, args, kwargs: called.append(("out", o))),
    ]
    train(pair.ours, pair.wrapped, 2)
    expected = [
        ("before", pair.wrapped), ("in", pair.inner), ("out", pair.inner), ("after", pair.wrapped)
    ]  # fmt: skip
    assert called == expected * 2
    for handle in handles:
        handle.remove()
    train(pair.ours, pair.wrapped, 1)
    assert called == expected * 2


@pytest.mark.parametrize("info", CLOSURELESS)
def test_a_hook_may_change_gradients_before_the_step(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    for _, optimizer in pair.both:
        optimizer.register_step_pre_hook(
            lambda o, args, kwargs: [
                p.grad.mul_(0.5) for g in o.param_groups for p in g["params"]
            ] and None
        )  # fmt: skip
    pair.train(3)
    pair.assert_same()


@pytest.mark.parametrize("info", EVERY)
def test_hooks_around_states(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    pair.train(1)
    wrapped, called = pair.wrapped, []
    handles = [
        wrapped.register_state_dict_pre_hook(lambda o: called.append(("saving", o))),
        wrapped.register_state_dict_post_hook(lambda o, state: {**state, "note": "x"}),
        wrapped.register_state_dict_post_hook(lambda o, state: called.append(("saved", o))),
        wrapped.register_load_state_dict_pre_hook(
            lambda o, state: {k: v for k, v in state.items() if k != "note"}
        ),
        wrapped.register_load_state_dict_pre_hook(
            lambda o, state: called.append(("loading", "note" in state))
        ),
        wrapped.register_load_state_dict_post_hook(lambda o: called.append(("loaded", o))),
    ]
    state = wrapped.state_dict()
    assert state["note"] == "x"
    assert KEY in state
    wrapped.load_state_dict(state)
    assert "note" in state, "what is given to load_state_dict stays as it was"
    assert called == [
        ("saving", wrapped), ("saved", wrapped), ("loading", False), ("loaded", wrapped)
    ]  # fmt: skip
    for handle in handles:
        handle.remove()
    assert "note" not in wrapped.state_dict()
    assert len(called) == 4


@pytest.mark.parametrize("info", EVERY)
def test_gradients_are_cleared_as_asked(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    pair.train(1)
    gradients = [p.grad for p in pair.ours.parameters()]
    assert all(gradient is not None for gradient in gradients)
    if dense(info):
        pair.wrapped.zero_grad(set_to_none=False)
        for parameter, gradient in zip(pair.ours.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert gradient is not None
            assert not gradient.any()
    pair.wrapped.zero_grad()
    assert all(p.grad is None for p in pair.ours.parameters())


@pytest.mark.parametrize("info", EVERY)
def test_it_looks_like_the_optimizer(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    assert isinstance(pair.wrapped, torch.optim.Optimizer)
    assert repr(pair.inner) in repr(pair.wrapped)
    assert pair.wrapped.defaults == pair.bare.defaults
    for name in (n for n in vars(pair.bare) if not n.startswith("_")):
        assert hasattr(pair.wrapped, name), name


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    **{
        f"torch-{number}": each
        for number, each in enumerate(s for i in INFOS.values() for s in i.scheduler_inputs[0])
        if number < 2
    },
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=9),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 0.01, 0.05, 2, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
        ],
        optimizer=o,
    ),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
        ],
        milestones=[2],
    ),
    "swa": lambda o: SWALR(o, swa_lr=0.003, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("info", [INFOS["SGD"], INFOS["Adam"]], ids=["SGD", "Adam"])
def test_schedules_give_the_same_rates(info: Any, name: str, tmp_path: Path) -> None:
    settings = {"lr": 0.01} | ({"momentum": 0.9} if info.name == "SGD" else {})
    pair = Pair(tmp_path, info, METHODS["average"], settings)
    found = []
    for model, optimizer in pair.both:
        schedule: Any = SCHEDULES[name](optimizer)
        rates: list[list[float]] = []

        def move(o: Any, schedule: Any = schedule, rates: list[list[float]] = rates) -> None:
            plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(*[1.0] * plateau)
            rates.append([float(group["lr"]) for group in o.param_groups])

        train(model, optimizer, 7, move)
        found.append(rates)
    assert found[0] == found[1]
    pair.assert_same()


@pytest.mark.parametrize("info", EVERY)
def test_each_optimizer_follows_a_schedule(info: Any, tmp_path: Path) -> None:
    pair = Pair(tmp_path, info)
    for model, optimizer in pair.both:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 3, lambda _, schedule=schedule: schedule.step())  # type: ignore[misc]
    pair.assert_same()
