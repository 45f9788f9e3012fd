"""A member with the whole model takes over what the members of stages agreed on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.checkpoint import Part
from atoll.config import JobSpec
from atoll.errors import GroupLeft, PeerLost
from atoll.group.single import SingleGroup
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.strategies.resolve import resolve
from atoll.train.build import Built, build
from atoll.train.swarm.whole import LateStages, StagesOuter
from atoll.wire.swarm import SwarmAnnounce, SwarmPlace
from tests.train.swarm.kit import COUNT, FromMembers, job_of, step
from tests.train.swarm.test_outer import DILOCO, stages_of


class Hub(FromMembers):
    """Says who has the stages, and gives their files."""

    def __init__(self, files: list[Part], *, over: bool = False) -> None:
        super().__init__()
        self.files, self.over = files, over
        self.requests, self.there = 0, 3
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def __call__(self, question: SwarmAnnounce) -> SwarmPlace:
        self.requests += 1
        donors = [] if self.over or self.requests <= 2 else ["w1"]
        return SwarmPlace(0, question.stage, 3, donors=donors, finished=self.over, round=2)

    def donated(self, place: SwarmPlace) -> Part:
        if place.step != self.there:
            raise PeerLost("another step")
        found: Part = self.files[place.stage]
        return found


def late(folder: Path, hub: Hub) -> tuple[Built, StagesOuter]:
    """Return a member that joins a run under way, before its first step."""
    spec: JobSpec = job_of(folder)
    built = build(spec, member="w0", slot=0, num_slots=2)
    late = LateStages(hub, hub, should_stop=lambda: hub.requests > 9, close=hub.close)
    outer = StagesOuter(resolve(DILOCO), cut=StageCut(stages=2), states=late, late=True)
    outer.setup(built.task, group=SingleGroup(), codec=built.codec)
    return built, outer


def trained(folder: Path) -> list[Part]:
    """Return the stages after three steps; they met after the second."""
    stages, path = stages_of(folder)
    rows = stages.rows(COUNT)
    for number in range(3):
        step(path, rows, number)
    return [stage.part() for stage in path]


def test_it_waits_for_donors_and_takes_their_optimizers(tmp_path: Path) -> None:
    files = trained(tmp_path)
    hub = Hub([Part(f.name, f.tensors, {**f.metadata, "step": "3"}) for f in files])
    built, _ = late(tmp_path, hub)
    assert hub.requests > 2
    assert hub.closed
    assert (built.task.step, built.task.round) == (3, 1)
    held = {n: t for f in files for n, t in f.tensors.items()}
    for name, parameter in built.model.named_parameters():
        agreed = held[f"outer.shared.start/{name}"].view_as(parameter)
        assert torch.equal(parameter, agreed), "what was agreed on, not the stage's newest"
        moment = built.task.optimizer.state[parameter]["exp_avg"]
        assert torch.equal(moment, held[f"optimizer/{name}/exp_avg"])


def test_when_the_stages_have_ended_it_ends_with_their_model(tmp_path: Path) -> None:
    files = trained(tmp_path)
    built, outer = late(tmp_path, Hub(files, over=True))
    with torch.no_grad():
        for parameter in built.task.parameters():
            parameter.add_(1.0)  # a step beyond the end
    built.task.advance()
    result = outer.sync(built.task)
    assert result is not None
    assert result.ends(SingleGroup())
    assert (built.task.step, built.task.round) == (3, 2)
    held = {n: t for f in files for n, t in f.tensors.items()}
    for name, parameter in built.model.named_parameters():
        assert torch.equal(parameter, held[f"outer.shared.start/{name}"].view_as(parameter))


def test_it_leaves_when_it_is_stopped_before_they_come(tmp_path: Path) -> None:
    hub = Hub(trained(tmp_path))
    hub.there = 4
    with pytest.raises(GroupLeft, match="before the stages came"):
        late(tmp_path, hub)


def test_its_steps_until_a_round_follow_its_pace(tmp_path: Path) -> None:
    built = build(job_of(tmp_path), member="w0", slot=0, num_slots=2)
    outer = StagesOuter(resolve(DILOCO), cut=StageCut(stages=2))
    outer.setup(built.task, group=SingleGroup(), codec=built.codec)
    outer._stages[0].task.pace = 2.0
    outer._plan(built.task)
    steps = 0
    while built.task.step < 2:  # the next round is due then
        assert outer.sync(built.task) is None
        built.task.advance()
        steps += 1
    assert steps == 4
