"""The committed state, taken from one member in the middle of its period and put into another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.checkpoint.format.part import Part, part_blocks, read_part
from atoll.codec import make_codec
from atoll.errors import CheckpointError
from atoll.group.single import SingleGroup
from atoll.methods.periodic import Average
from atoll.task import Task
from atoll.train.state.committed import CommittedState, adopt
from tests.contracts.strategy_suite import Run, adamw, small_model, start_run

OPTIONS = [atoll.DiLoCo(every=4), Average(every=4), atoll.EveryStep()]


def through_bytes(part: Part, folder: Path) -> Part:
    """Return the part as it arrives elsewhere."""
    path = folder / part.name
    path.write_bytes(b"".join(bytes(block) for block in part_blocks(part.tensors, part.metadata)))
    return read_part(path)


def newcomer(options: Any, *, hidden: int = 3) -> tuple[Task, Any, SingleGroup]:
    model = small_model(seed=99, normalised=True)
    if hidden != 3:
        model = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    task, outer, group = (
        Task(model, adamw(model), member="w7"),
        options.build(),
        SingleGroup(me="w7"),
    )
    outer.setup(task, group=group, codec=make_codec("fp32"))
    return task, outer, group


def trained(options: Any, steps: int) -> Run:
    run = start_run(options, SingleGroup(), 0, model=small_model(normalised=True))
    run.train(steps)
    return run


def state_of(run: Run) -> CommittedState:
    return CommittedState(run.task, run.outer)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: type(o).__name__)
def test_a_newcomer_stands_where_the_last_round_left_everybody(
    options: Any, tmp_path: Path
) -> None:
    run = trained(options, 10)  # two steps after the round at step 8
    state = state_of(run)
    shared, inner = (through_bytes(part, tmp_path) for part in state.parts())
    task, outer, _ = newcomer(options)
    adopt(task, outer, shared=shared, inner=inner)
    assert task.past == run.task.past != ""
    assert (task.round, outer.committed(task).base) == (state.round, state.base)
    if isinstance(options, atoll.EveryStep):
        assert task.step == 10
        assert all(map(torch.equal, task.parameters(), run.task.parameters()))
    else:
        assert task.step == 8
        found = outer.committed(task).tensors
        expected = run.outer.committed(run.task).tensors
        assert found is not None
        assert expected is not None
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, task.parameters(), expected))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: type(o).__name__)
def test_newcomer_and_donor_go_on_alike_from_a_round(options: Any, tmp_path: Path) -> None:
    run = trained(options, 8)
    shared, inner = (through_bytes(part, tmp_path) for part in state_of(run).parts())
    task, outer, group = newcomer(options)
    group.committed_round = run.task.round
    adopt(task, outer, shared=shared, inner=inner)
    copy = Run(task, outer, run.stream, run.inner)
    batches = [next(run.stream) for _ in range(8)]
    for one in (run, copy):
        one.stream = iter(batches)
        one.train(8)
    assert torch.equal(run.vector(), copy.vector())
    mine, theirs = run.outer.state_dict(), outer.state_dict()
    shared_keys = [key for key in mine if key.startswith("shared.")]
    assert shared_keys
    assert all(torch.equal(mine[key], theirs[key]) for key in shared_keys)


def test_members_of_one_round_share_the_same_bytes() -> None:
    texts = []
    for steps in (8, 9, 11):
        shared, _ = state_of(trained(atoll.DiLoCo(every=4), steps)).parts()
        texts.append(b"".join(bytes(b) for b in part_blocks(shared.tensors, shared.metadata)))
    assert texts[0] == texts[1] == texts[2]


def test_the_state_of_another_model_is_refused_and_named(tmp_path: Path) -> None:
    parts = state_of(trained(atoll.DiLoCo(every=4), 8)).parts()
    task, outer, _ = newcomer(atoll.DiLoCo(every=4), hidden=4)
    with pytest.raises(CheckpointError):
        adopt(task, outer, shared=parts[0], inner=parts[1])


def test_a_state_that_is_not_the_one_it_claims_to_be_is_refused(tmp_path: Path) -> None:
    shared, inner = (
        through_bytes(part, tmp_path)
        for part in state_of(trained(atoll.DiLoCo(every=4), 8)).parts()
    )
    name = next(name for name in shared.tensors if name.endswith("shared.start"))
    shared.tensors[name].view(-1)[3] += 1.0
    task, outer, _ = newcomer(atoll.DiLoCo(every=4))
    with pytest.raises(CheckpointError):
        adopt(task, outer, shared=shared, inner=inner)


def test_without_a_donors_optimizer_the_own_one_stays(tmp_path: Path) -> None:
    shared, _ = state_of(trained(atoll.DiLoCo(every=4), 8)).parts()
    task, outer, _ = newcomer(atoll.DiLoCo(every=4))
    adopt(task, outer, shared=shared, inner=None)
    assert task.optimizer.state_dict()["state"] == {}
