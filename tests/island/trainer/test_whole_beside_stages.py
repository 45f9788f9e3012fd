"""An island with the whole model beside a SWARM: the stages cannot tell it from one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from atoll.codec import make_codec
from atoll.config import StrategyTable
from atoll.group.period import PeriodReport
from atoll.group.single import SingleGroup
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.strategies.resolve import resolve
from atoll.train.swarm.whole import StagesOuter
from atoll.wire.messages import RoundPlan
from tests.island.leading import (
    MODELS,
    Member,
    by_itself,
    count_calls,
    lead,
    same,
    table,
    task_of,
    worker_of,
)
from tests.island.pool import Ranks

MODEL, TRAIN, STEPS = "untied", table(steps=20), 5
DILOCO = StrategyTable(
    preset="diloco", codec="fp32", options={"every": 2, "outer_lr": 0.8, "shared_steps": 9}
)
AXES = [{"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}]


class EachStage(SingleGroup):
    """A member that is alone in the rounds of every stage, which count by themselves."""

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        self.committed_round = report.round
        return super().join(report, deadline=deadline)


def stages_of(member: Member) -> Member:
    """Let a member meet two stages, of which nobody else is there."""
    member.outer = StagesOuter(resolve(DILOCO), cut=StageCut(stages=2))
    member.outer.setup(member.task, group=EachStage(), codec=make_codec("fp32"))
    return member


def _trained(axes: dict[str, int]) -> tuple[dict[str, Tensor], list[str]] | None:
    """Return parameters and commands of an island that trains; on the first rank."""
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    worker = worker_of(broadcaster, MODELS[MODEL], TRAIN, axes)
    if not broadcaster.leads:
        broadcaster.serve()
        return None
    task = task_of(MODELS[MODEL](), TRAIN)
    inner: Any = lead(task, broadcaster, worker)
    outer: Any = None
    member = stages_of(Member(task, inner, outer, broadcaster))
    told = count_calls(member)
    try:
        member.train(STEPS)
        assert member.outer.finish(task) is not None
        commands = [verb for verb in told if verb in ("pull", "push")]
        return member.parameters(), commands
    finally:
        broadcaster.end()


@pytest.mark.parametrize("axes", AXES, ids=[next(iter(axes)) for axes in AXES])
def test_any_mesh_meets_the_stages_as_one_process(ranks: Ranks, axes: dict[str, int]) -> None:
    found, commands = ranks.run(2, _trained, axes)[0]
    member = stages_of(by_itself(MODEL, TRAIN))
    member.train(STEPS)
    assert member.outer.finish(member.task) is not None
    same(found, member.parameters(), 1e-5)
    assert commands == ["pull", "push"] * 3, "once for the rounds of all stages"
