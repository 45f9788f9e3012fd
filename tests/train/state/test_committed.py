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
from atoll.errors import AtollError, CheckpointError
from atoll.group.single import SingleGroup
from atoll.methods.periodic import Average
from atoll.task import Task
from atoll.train.state.committed import CommittedState, adopt
from atoll.train.state.trained_set import TrainedSet
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


@pytest.mark.parametrize("texts", [{}, {"tree": "1"}], ids=["no tree", "no names"])
def test_bytes_that_are_no_state_are_refused(texts: dict[str, str]) -> None:
    task, outer, _ = newcomer(atoll.DiLoCo(every=4))
    with pytest.raises(CheckpointError, match="does not fit"):
        adopt(task, outer, shared=Part("shared", {}, texts), inner=None)


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


def half_frozen(seed: int, *, large: bool) -> nn.Module:
    """Return two layers of which the first, frozen one may be the larger."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3 if large else 1), nn.Linear(3 if large else 1, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if not large:
        model.append(nn.Linear(2, 9))
    model.get_submodule("0").requires_grad_(False)
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: type(o).__name__)
def test_a_newcomer_has_the_frozen_parameters_of_the_others(options: Any) -> None:
    for large in (False, True):
        donor, late = half_frozen(1, large=large), half_frozen(2, large=large)
        tasks = [Task(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (donor, late)]
        outers = [options.build() for _ in tasks]
        for task, outer in zip(tasks, outers, strict=True):
            outer.setup(task, group=SingleGroup(), codec=make_codec("fp32"))
        outers[0].begin(tasks[0])
        shared, inner = CommittedState(tasks[0], outers[0]).parts()
        if large:
            with pytest.raises(AtollError, match=r"frozen parameters differ.*0\.weight, 0\.bias"):
                adopt(tasks[1], outers[1], shared=shared, inner=inner)
            continue
        adopt(tasks[1], outers[1], shared=shared, inner=inner)
        for name, value in donor.state_dict().items():
            assert torch.equal(late.state_dict()[name], value)


def test_a_newcomer_exchanges_what_the_others_unfroze() -> None:
    parts = []
    for seed in (1, 2):
        model, group = half_frozen(seed, large=False), SingleGroup()
        task = Task(model, torch.optim.SGD(model.parameters(), 0.1))
        outer: Any = atoll.DiLoCo(every=4).build()
        outer.setup(task, group=group, codec=make_codec("fp32"))
        parts.append(
            TrainedSet(
                task, outer, model=model, group=group, codec="fp32", after_round=lambda _: None
            )
        )
        if seed == 1:
            outer.begin(task)
            model.requires_grad_(True)
            parts[0].renew()
            state = CommittedState(task, outer)
            shared, inner = state.parts()
        else:
            adopt(task, outer, shared=shared, inner=inner)
            assert CommittedState(task, outer).base == state.base
    first, second = (part.task.parameters() for part in parts)
    assert len(first) == len(second) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
