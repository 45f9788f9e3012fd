from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import atoll
from atoll.checkpoint import load_weights
from atoll.errors import ConfigError, DataError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run, join
from atoll.run.place import Membership
from atoll.train.results.result import as_atoll_error
from tests.contracts.strategy_suite import (
    BATCH,
    adamw,
    batches,
    plain_training,
    small_model,
    squared_error,
)


def make_run(group: Group, folder: Path, *, num_slots: int = 2) -> Run:
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=num_slots))


def train_with(run: Run, outer: Any, *, steps: int, seed: int = 3, codec: str = "") -> nn.Module:
    model = small_model(seed=seed)
    optimizer = run.wrap(model, adamw(model), outer=outer, codec=codec)
    stream = batches(run.slot)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = squared_error(model, next(stream))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(loss=loss, tokens=BATCH)
    return model


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_script_started_by_hand_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_JOB", raising=False)
    with join() as run:
        assert (run.member, run.members, run.slot, run.num_slots) == ("w0", ("w0",), 0, 1)
        assert not run.stopping
        model = train_with(run, "local-sgd", steps=20)
    assert torch.equal(vector(model), plain_training(20))


@pytest.mark.parametrize("outer", [atoll.DiLoCo(every=3), atoll.Average(every=4), "ddp"])
def test_members_of_a_script_end_with_one_model(outer: Any, tmp_path: Path) -> None:
    def body(group: Group) -> Tensor:
        with make_run(group, tmp_path) as run:
            model = train_with(run, outer, steps=10, seed=run.slot, codec="int8")
        return vector(model)

    first, second = MemoryGroups(2).together(body)
    assert torch.equal(first, second)


def test_schedulers_see_the_wrapped_optimizer(tmp_path: Path) -> None:
    with make_run(MemoryGroups(1)[0], tmp_path) as run:
        model = small_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        optimizer = run.wrap(model, inner, outer="local-sgd")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        squared_error(model, next(batches(0)))[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        assert inner.param_groups[0]["lr"] == 0.5
        assert optimizer.state is inner.state
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert "DiLoCo" not in repr(optimizer)


def test_the_state_of_a_wrapped_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Any, start: int, steps: int) -> None:
        stream = batches(0, start=start)
        for _ in range(steps):
            optimizer.zero_grad()
            squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    whole, half = small_model(), small_model()
    first = make_run(MemoryGroups(1)[0], tmp_path).wrap(
        whole, adamw(whole), outer=atoll.DiLoCo(every=4)
    )
    train(whole, first, 0, 10)
    second = make_run(MemoryGroups(1)[0], tmp_path).wrap(
        half, adamw(half), outer=atoll.DiLoCo(every=4)
    )
    train(half, second, 0, 6)
    saved, weights = second.state_dict(), half.state_dict()
    again = small_model(seed=9)
    third = make_run(MemoryGroups(1)[0], tmp_path).wrap(
        again, adamw(again), outer=atoll.DiLoCo(every=4)
    )
    again.load_state_dict(weights)
    third.load_state_dict(saved)
    train(again, third, 6, 4)
    assert torch.equal(vector(whole), vector(again))


def test_a_closure_is_called_once_and_its_loss_returned(tmp_path: Path) -> None:
    run = make_run(MemoryGroups(1)[0], tmp_path)
    model = small_model()
    optimizer = run.wrap(model, adamw(model), outer="ddp")
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss, _ = squared_error(model, next(batches(0)))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure) > 0
    assert len(calls) == 1


def test_everything_is_wrapped_in_one_call(tmp_path: Path) -> None:
    run = make_run(MemoryGroups(1)[0], tmp_path)
    model = small_model()
    run.wrap(model, adamw(model))
    with pytest.raises(ConfigError, match=r"called once(.|\n)*run\.wrap\(\[disc"):
        run.wrap(model, adamw(model))


def test_only_the_first_member_saves_the_agreed_weights(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[Path | None, Tensor]:
        folder = tmp_path / group.me
        with make_run(group, folder) as run:
            model = train_with(run, atoll.DiLoCo(every=4), steps=6)
            path = run.save(model)
        return path, vector(model)

    (path, mine), (none, theirs) = MemoryGroups(2).together(body)
    assert none is None
    assert path is not None
    assert torch.equal(mine, theirs)
    assert not (tmp_path / "w1").exists() or not list((tmp_path / "w1").iterdir())
    with pytest.raises(atoll.AtollError, match="does not say which model"):
        load_weights(path)  # a script's own model has no name; any safetensors reader reads it


def test_shares_of_a_loader_are_disjoint_and_together_the_whole(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True)
    seen = []
    for group in MemoryGroups(3):
        share = make_run(group, tmp_path, num_slots=3).shard(loader)
        found = [int(x) for (batch,) in share for x in batch]
        assert len(share) == 2
        seen += found
    assert sorted(seen) == list(range(23))


def test_shares_are_disjoint_and_cover_the_data(tmp_path: Path) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    runs = [make_run(group, tmp_path) for group in MemoryGroups(2)]
    subsets = [run.shard(list(range(9))) for run in runs]
    assert all(isinstance(subset, Subset) for subset in subsets)
    assert sorted(x for subset in subsets for x in subset) == list(range(9))
    lists = [list(run.shard(x for x in range(10))) for run in runs]
    assert sorted(lists[0] + lists[1]) == list(range(10))
    batches_of = [
        [int(x) for x in run.shard(DataLoader(Endless(), batch_size=None))] for run in runs
    ]
    assert sorted(batches_of[0] + batches_of[1]) == list(range(10))


def test_too_few_samples_to_deal_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 samples for 2 members"):
        make_run(MemoryGroups(2)[0], tmp_path).shard([1])


def test_a_share_ends_when_the_job_is_asked_to_stop(tmp_path: Path) -> None:
    groups = MemoryGroups(1)
    run = make_run(groups[0], tmp_path, num_slots=1)
    seen = []
    for item in run.shard(iter(range(100))):
        seen.append(item)
        if item == 3:
            groups[0].stopping = True
    assert seen == [0, 1, 2, 3]
    assert run.stopping


def test_what_a_script_raised_is_reported_with_its_line() -> None:
    try:
        raise KeyError("colour")
    except KeyError as error:
        failure = as_atoll_error(error)
    assert failure.what == "test_run.py raised KeyError: 'colour'"
    assert re.fullmatch(r"line \d+ of test_run.py", str(failure.given))
    assert str(failure.remedy).endswith("atoll logs")


def test_items_not_stored_at_the_end_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.run.member.FLUSH_TIMEOUT_S", 0.0)
    with make_run(SingleGroup(), tmp_path) as run:
        queue = run.queue("narrow", max_items=1, overflow="wait")
        queue.put(1)
        queue.put_later(2)
    assert "not stored" in caplog.text
