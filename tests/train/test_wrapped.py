"""A wrapped optimizer in the loops that people write."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.errors import ConfigError
from atoll.group.aggregation import Aggregation
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.optim.muon import muon
from tests.contracts.strategy_suite import BATCH, adamw, batches, sgd, small_model, squared_error

DILOCO = atoll.DiLoCo(every=3, outer_lr=0.5, outer_momentum=0.5)


def make_run(folder: Path, group: Group | None = None) -> Run:
    group = group or SingleGroup()
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=2))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_accumulation_and_schedules_equal_a_plain_loop(
    tmp_path: Path,
) -> None:
    def train(optimizer: Any, model: nn.Module) -> Tensor:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        stream = batches(0)
        for _ in range(8):
            for _ in range(3):
                (squared_error(model, next(stream))[0] / 3).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return vector(model)

    def groups_of(model: nn.Module) -> Any:
        *first, last = model.parameters()
        return torch.optim.AdamW(
            [{"params": first, "weight_decay": 0.2}, {"params": [last], "lr": 0.1}], lr=0.02
        )

    plain, ours = small_model(), small_model()
    wrapped = make_run(tmp_path).wrap(ours, groups_of(ours), outer="local-sgd")
    assert torch.equal(train(groups_of(plain), plain), train(wrapped, ours))


def test_line_search_optimizer_gets_the_closure(tmp_path: Path) -> None:
    batch = next(batches(0))

    def train(model: nn.Module, optimizer: Any) -> tuple[Tensor, int]:
        calls = []

        def closure() -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss, _ = squared_error(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return vector(model), len(calls)

    def searching(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)

    plain, ours = small_model(), small_model()
    expected, calls = train(plain, searching(plain))
    found, own_calls = train(
        ours, make_run(tmp_path).wrap(ours, searching(ours), outer=atoll.Average(every=2))
    )
    assert calls == own_calls > 4
    assert torch.equal(expected, found)
    with pytest.raises(ConfigError, match="several times per step"):
        make_run(tmp_path).wrap(small_model(), searching(ours), outer="ddp")


def test_schedules_survive_a_replaced_optimizer_state(tmp_path: Path) -> None:
    """A member that takes over another's state loads it into the inner optimizer."""
    model = small_model()
    inner = adamw(model)
    optimizer = make_run(tmp_path).wrap(model, inner, outer=DILOCO)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    optimizer.step()
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state


def test_muon_trains_members_that_end_with_one_model(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[Tensor, dict[str, Any]]:
        with make_run(tmp_path, group) as run:
            model = small_model()
            optimizer = run.wrap(model, muon(model, lr=0.05), outer=DILOCO, codec="feedback(int8)")
            stream = batches(run.slot)
            for _ in range(8):
                optimizer.zero_grad()
                squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
                run.log(tokens=BATCH)
                optimizer.step()
        return vector(model), optimizer.state_dict()

    (first, state), (second, _) = MemoryGroups(2).together(body)
    assert torch.equal(first, second)
    assert not torch.equal(first, vector(small_model()))
    assert {"momentum_buffer"} in [set(entry) for entry in state["state"].values()]


def test_agreed_parameters_are_readable_between_rounds(tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        with make_run(tmp_path, group) as run:
            model = small_model(seed=run.slot)
            optimizer = run.wrap(model, sgd(model), outer=DILOCO)
            agreed, stream = [], batches(run.slot)
            for _ in range(5):
                optimizer.zero_grad()
                squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                before = vector(model)
                with run.evaluating():
                    agreed.append(vector(model))
                assert torch.equal(before, vector(model))
        return agreed

    first, second = MemoryGroups(2).together(body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0], first[1])  # no round before the third step
    assert not torch.equal(first[1], first[2])
    assert torch.equal(first[2], first[4])


def test_before_anything_is_wrapped_there_is_nothing_agreed(tmp_path: Path) -> None:
    model, run = small_model(), make_run(tmp_path)
    before = vector(model)
    with run.evaluating():
        assert torch.equal(vector(model), before)
    optimizer = run.wrap(model, sgd(model), outer=DILOCO)
    squared_error(model, next(batches(0)))[0].backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    ahead = vector(model)
    with run.evaluating():
        assert torch.equal(vector(model), before)
    assert torch.equal(vector(model), ahead)


def test_the_aggregation_is_set_before_the_first_round(tmp_path: Path) -> None:
    run = make_run(tmp_path, MemoryGroups(1)[0])
    model = small_model()
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        run.wrap(model, sgd(model), outer="ddp", collective="rign")
    run.wrap(model, sgd(model), outer="ddp", collective="butterfly")
    assert run.group.aggregation == Aggregation(collective="butterfly")
