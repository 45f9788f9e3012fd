"""Saved by N members, gone on with by M, under the same or another outer strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.checkpoint import (
    BackgroundSaver,
    DirectoryStore,
    Extras,
    FolderTarget,
    OuterState,
    Restored,
    Saved,
    SavePoint,
    adopt,
    collect,
    resume,
)
from atoll.codec import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.strategies.inner.local import Local
from atoll.task import Task
from tests.checkpoint.savers import WAIT_S
from tests.contracts.strategy_suite import (
    Run,
    adamw,
    batches,
    small_model,
    squared_error,
    start_run,
)
from tests.patience import PATIENCE_S

STRATEGIES: dict[str, Any] = {
    "diloco": atoll.DiLoCo(every=4, warmup_steps=0),
    "average": atoll.Average(every=4),
    "every_step": atoll.EveryStep(),
}
LEASES = {0: {"offset": 8}, 1: {"offset": 4, "data_pass": 1}, 4: {}}


def save(saver: BackgroundSaver, run: Run, group: Group, *, strategy: str) -> None:
    run.task.leases = LEASES
    own, common = collect(
        run.task,
        OuterState(run.outer.state_dict(), base=run.results[-1].digest),
        Extras(strategy=strategy, cursor={"slot": int(group.me[1:])}),
    )
    point = SavePoint(run.task.round, run.task.step, group.me, group.members)
    outcome = saver.save(point, [own, common] if point.shared else [own], final=True)
    assert isinstance(outcome, Saved)
    assert saver.close(WAIT_S)


def fresh(folder: Path, *, members: int, strategy: str, codec: str = "fp32") -> list[Run]:
    """Train eight steps and save."""

    def body(group: Group) -> Run:
        run = start_run(STRATEGIES[strategy], group, int(group.me[1:]), codec=codec)
        run.train(8)
        target = FolderTarget(folder=str(folder / "job"))
        save(BackgroundSaver(target, scratch=folder / group.me), run, group, strategy=strategy)
        return run

    return MemoryGroups(members).together(body, timeout_s=PATIENCE_S)


def go_on(
    folder: Path, *, members: int, strategy: str, codec: str = "fp32"
) -> tuple[list[Run], list[Restored], list[str]]:
    """Resume, train eight more steps and save."""
    store = DirectoryStore(folder / "job")
    round_ = store.latest()

    def body(group: Group) -> tuple[Run, Restored, str]:
        model = small_model(seed=99)
        task = Task(model, adamw(model), member=group.me)
        restored = resume(store, round_, task, strategy=strategy)
        outer = STRATEGIES[strategy].build()
        outer.setup(task, group=group, codec=make_codec(codec))
        warning = adopt(outer, restored, strategy=strategy)
        outer.rejoin(task)
        stream = batches(int(group.me[1:]), start=task.step)
        run = Run(task, outer, stream, Local(squared_error, clip=1.0))
        run.rounds.append(run.vector())
        run.train(8)
        target = FolderTarget(folder=str(folder / "job"))
        save(BackgroundSaver(target, scratch=folder / group.me), run, group, strategy=strategy)
        return run, restored, warning

    done = MemoryGroups(members, start_round=round_).together(body, timeout_s=PATIENCE_S)
    return [run for run, _, _ in done], [r for _, r, _ in done], [w for _, _, w in done]


def assert_identical(runs: list[Run]) -> None:
    assert len({run.vector().numpy().tobytes() for run in runs}) == 1
    assert len({run.results[-1].digest for run in runs}) == 1


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 2), (3, 1), (2, 5), (5, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.every(4)
def test_as_many_members_as_there_are_go_on(
    tmp_path: Path, strategy: str, before: int, after: int
) -> None:
    saved = fresh(tmp_path, members=before, strategy=strategy)
    runs, restored, warnings = go_on(tmp_path, members=after, strategy=strategy)
    assert warnings == [""] * after
    for run in runs:
        assert torch.equal(run.rounds[0], saved[0].vector())
        assert run.task.step == 16
    assert_identical(runs)
    assert [r.borrowed for r in restored] == [slot >= before for slot in range(after)]
    for slot, found in enumerate(restored):
        assert found.leases == LEASES
        assert found.strategy == strategy
        assert found.cursor == ({"slot": slot} if slot < before else None)


def test_same_members_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    fresh(tmp_path, members=2, strategy="diloco")
    runs, _, _ = go_on(tmp_path, members=2, strategy="diloco")

    def body(group: Group) -> Run:
        run = start_run(STRATEGIES["diloco"], group, int(group.me[1:]))
        run.train(16)
        return run

    through = MemoryGroups(2).together(body, timeout_s=PATIENCE_S)
    assert torch.equal(runs[0].vector(), through[0].vector())


@pytest.mark.parametrize("between", ["every_step", "average"])
def test_strategy_may_change_and_change_back(tmp_path: Path, between: str) -> None:
    fresh(tmp_path, members=2, strategy="diloco")
    runs, _, warnings = go_on(tmp_path, members=3, strategy=between)
    assert_identical(runs)
    for warning in warnings:
        assert f"written under diloco, the run uses {between}" in warning
        assert "shared." in warning
    runs, restored, warnings = go_on(tmp_path, members=2, strategy="diloco")
    assert_identical(runs)
    assert all(f"written under {between}" in warning for warning in warnings)
    assert runs[0].task.step == 24
    assert not any(found.borrowed for found in restored)


def test_codec_may_change_and_what_it_owed_is_left_out_by_name(tmp_path: Path) -> None:
    fresh(tmp_path, members=2, strategy="diloco", codec="feedback(int8)")
    runs, _, warnings = go_on(tmp_path, members=2, strategy="diloco")
    assert_identical(runs)
    assert all("the codec's residual is left out" in warning for warning in warnings)


def test_checkpoint_that_names_no_strategy_is_tried(tmp_path: Path) -> None:
    class Outer:
        def load_state_dict(self, state: object) -> None:
            raise KeyError("shared.start")

    state = {"shared.base": torch.zeros(1)}
    warning = adopt(Outer(), Restored(outer=state), strategy="diloco")
    assert "of another strategy and is left out: no 'shared.start'" in warning
    with pytest.raises(KeyError):
        adopt(Outer(), Restored(outer=state, strategy="diloco"), strategy="diloco")
    assert adopt(Outer(), Restored(outer={}), strategy="diloco") == ""


def test_state_of_another_model_is_refused() -> None:
    class Outer:
        def load_state_dict(self, state: object) -> None:
            raise ConfigError("this state belongs to another model")

    restored = Restored(outer={"shared.start": torch.zeros(1)}, strategy="diloco")
    with pytest.raises(ConfigError, match="another model"):
        adopt(Outer(), restored, strategy="diloco")
