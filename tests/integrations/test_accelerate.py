"""Accelerate's own optimizer, scaler and gradient accumulation around a wrapped optimizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

import atoll as package
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from tests.contracts.strategy_suite import BATCH, adamw, batches, small_model, squared_error
from tests.e2e.conftest import Atoll
from tests.integrations.examples import assert_same, load, run_on_two_nodes, take_over

accelerate = pytest.importorskip("accelerate", reason="pip install 'atoll[hf]'")
STEPS = 24


def make_run(group: Group, folder: Path) -> Run:
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=2))


@pytest.mark.e2e
def test_two_processes_end_as_the_native_loop(atoll: Atoll, tmp_path: Path) -> None:
    example = load("accelerate_loop")
    models = [example.make_model() for _ in range(2)]  # not in the threads: they share a seed

    def native(group: Group) -> nn.Module:
        with make_run(group, tmp_path) as run:
            model: nn.Module = models[run.slot]
            inner = torch.optim.AdamW(model.parameters(), 3e-3)
            outer = package.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
            optimizer = run.wrap(model, inner, outer=outer)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.998**step)
            stream = iter(DataLoader(run.shard(example.letters(4_000, 100_000)), batch_size=32))
            for _ in range(STEPS):
                optimizer.zero_grad()
                for inputs, targets in itertools.islice(stream, 2):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    (loss / 2).backward()  # type: ignore[no-untyped-call]
                    run.log(loss=loss, tokens=len(targets))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        return model

    first, second = MemoryGroups(2).together(native)
    assert_same(first.state_dict(), second, tolerance=0)
    assert_same(run_on_two_nodes(atoll, "accelerate_loop", steps=STEPS), first)


@pytest.mark.parametrize("outer", ["ddp", package.DiLoCo(every=3)])
def test_its_scaler_skips_steps_without_parting_the_members(tmp_path: Path, outer: Any) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, int]:
        with make_run(group, tmp_path) as run:
            model = small_model()
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            accelerator = accelerate.Accelerator(cpu=True)
            accelerator.scaler = GradScaler("cpu", init_scale=2.0**10)
            optimizer = accelerator.prepare(run.wrap(model, adamw(model), outer=outer))
            stream = batches(run.slot)
            for step in range(7):
                loss, _ = squared_error(model, next(stream))
                bad = step == 2 and run.member == "w1"
                accelerator.backward(loss * (float("inf") if bad else 1.0))
                run.log(loss=loss, tokens=BATCH)
                optimizer.step()
                optimizer.zero_grad()
            run.finish()
            rounds = run.group.committed_round
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        return before, after, rounds

    accelerate.Accelerator(cpu=True)  # makes what all of a process share, before there are threads
    (before, first, rounds), (_, second, others) = MemoryGroups(2).together(body)
    assert torch.equal(first, second)
    assert bool(first.isfinite().all())
    assert not torch.equal(first, before)
    assert rounds == others


def test_preparing_gives_the_state_back_unchanged(tmp_path: Path) -> None:
    """Accelerate loads the state that it has just taken, to bring it to its device."""

    def train(*, prepared: bool) -> Tensor:
        run = make_run(MemoryGroups(1)[0], tmp_path)
        model = small_model()
        optimizer: Any = run.wrap(model, adamw(model), outer=package.DiLoCo(every=3))
        stream = batches(0)
        for step in range(8):
            if step == 4 and prepared:
                optimizer = accelerate.Accelerator(cpu=True).prepare(optimizer)
            squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(prepared=False), train(prepared=True))


def test_a_member_that_joins_late_goes_on_at_the_groups_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("accelerate_loop")
    donor = make_run(SingleGroup(), tmp_path)
    example.train(donor, steps=20)
    rates: list[float] = []

    class Late(Run):
        def wrap(self, *args: Any, **options: Any) -> Any:
            optimizer = super().wrap(*args, **options)
            take_over(self, donor)
            return optimizer

        def log(self, **values: Any) -> None:
            assert self._optimizer is not None
            rates.append(self._optimizer.param_groups[0]["lr"])
            super().log(**values)

    run = Late(SingleGroup(), Membership(tmp_path, num_slots=2))
    example.train(run, steps=22)
    assert run.step == 22
    assert rates == [3e-3 * 0.998**step for step in (20, 20, 21, 21)]  # two batches each
