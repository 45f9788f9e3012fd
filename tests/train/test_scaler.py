"""A gradient scaler around a wrapped optimizer, with members of which one overflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import atoll
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.run import Run
from atoll.run.place import Membership
from tests.contracts.strategy_suite import BATCH, adamw, batches, sgd, small_model, squared_error

STEPS, BAD_STEP = 10, 4
LOCAL = atoll.DiLoCo(every=3, outer_lr=0.7, outer_momentum=0.9)
METHODS = [pytest.param("ddp", id="ddp"), pytest.param(LOCAL, id="diloco")]


class Trace:
    """What one member has seen."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.scales: list[float] = []
        self.skipped: list[bool] = []
        self.rounds = 0

    def vector(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def loop(
    run: Run, outer: Any, *, scaled: bool, clip: bool = False, bad: tuple[str, ...] = (),
    optimizer: Any = sgd, leave_out: bool = False,
) -> Trace:  # fmt: skip
    """Train; at one step the gradients of the members `bad` overflow, or are zero instead."""
    trace = Trace(small_model())
    wrapped = run.wrap(trace.model, optimizer(trace.model), outer=outer)
    scaler = GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
    schedule = torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 0.9**step)
    stream = batches(run.slot)
    for step in range(STEPS):
        mine = step == BAD_STEP and run.member in bad
        if leave_out and step == BAD_STEP and outer == "ddp":
            next(stream)
            schedule.step()
            continue
        loss, _ = squared_error(trace.model, next(stream))
        wrapped.zero_grad()
        scaler.scale(loss * (float("inf") if mine and scaled else 1.0)).backward()  # type: ignore[no-untyped-call]
        if mine and not scaled:
            for parameter in trace.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if clip:
            scaler.unscale_(wrapped)
            nn.utils.clip_grad_norm_(trace.model.parameters(), 0.5)
        run.log(loss=loss, tokens=BATCH)
        scaler.step(wrapped)
        scaler.update()
        schedule.step()
        trace.scales.append(scaler.get_scale())
        trace.skipped.append(wrapped.skipped)
    run.finish()
    trace.rounds = run.group.committed_round
    return trace


def together(folder: Path, outer: Any, **settings: Any) -> list[Trace]:
    def body(group: Group) -> Trace:
        slot = int(group.me[1:])
        with Run(group, Membership(folder, slot=slot, num_slots=2)) as run:
            return loop(run, outer, **settings)

    return MemoryGroups(2).together(body)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("outer", METHODS)
def test_a_scaler_changes_nothing_about_the_result(tmp_path: Path, outer: Any, clip: bool) -> None:
    plain = together(tmp_path, outer, scaled=False, clip=clip, optimizer=adamw)
    scaled = together(tmp_path, outer, scaled=True, clip=clip, optimizer=adamw)
    assert torch.equal(plain[0].vector(), scaled[0].vector())
    assert torch.equal(scaled[0].vector(), scaled[1].vector())
    assert not any(scaled[0].skipped)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [("w1",), ("w0", "w1")])
def test_data_parallel_members_skip_a_step_all_or_none(
    tmp_path: Path, bad: tuple[str, ...], clip: bool
) -> None:
    found = together(tmp_path, "ddp", scaled=True, bad=bad, clip=clip)
    expected = together(tmp_path, "ddp", scaled=False, leave_out=True, clip=clip)
    assert torch.equal(found[0].vector(), found[1].vector())
    assert torch.equal(found[0].vector(), expected[0].vector())
    for trace in found:
        assert trace.skipped == [step == BAD_STEP for step in range(STEPS)]
    assert found[0].rounds == found[1].rounds == expected[0].rounds + 1
    # Each member's scale is its own matter: only those that overflowed lower it.
    assert [trace.scales[-1] == 2.0**12 for trace in found] == ["w0" not in bad, "w1" not in bad]


def test_a_local_step_that_overflows_is_one_without_progress(tmp_path: Path) -> None:
    found = together(tmp_path, LOCAL, scaled=True, bad=("w1",))
    expected = together(tmp_path, LOCAL, scaled=False, bad=("w1",))
    assert torch.equal(found[0].vector(), found[1].vector())
    assert torch.equal(found[0].vector(), expected[0].vector())
    assert found[0].rounds == expected[0].rounds
    assert [any(trace.skipped) for trace in found] == [False, True]


def test_the_outer_step_is_not_unscaled(tmp_path: Path) -> None:
    # A scale is left in the attributes of an optimizer for one step only.
    run = Run(MemoryGroups(1)[0], Membership(tmp_path))
    trace = loop(run, atoll.DiLoCo(every=1), scaled=True)
    assert not hasattr(run._optimizer, "grad_scale")
    again = Run(MemoryGroups(1)[0], Membership(tmp_path))
    assert torch.equal(trace.vector(), loop(again, atoll.DiLoCo(every=1), scaled=False).vector())


class WithoutDoubles(Tensor):
    """A number on a device that has no float64, as MPS."""

    def double(self) -> Tensor:
        raise TypeError("the framework does not support float64")

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def test_a_scale_on_a_device_without_float64_is_divided_out(tmp_path: Path) -> None:
    model = small_model()
    wrapped = Run(MemoryGroups(1)[0], Membership(tmp_path)).wrap(model, sgd(model), outer="ddp")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 6.0)
    wrapped.grad_scale = torch.tensor(4.0).as_subclass(WithoutDoubles)  # type: ignore[attr-defined]
    wrapped.unscale(overflowed=False)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))
