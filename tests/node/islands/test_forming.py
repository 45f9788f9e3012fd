"""With which machines an island starts, and for which it waits. Real sockets, a real hub."""

from __future__ import annotations

import time

import pytest

from atoll.config import (
    IslandTable,
    JobSpec,
    MeshShape,
    StrategyTable,
    TrainTable,
    split_ranks,
)
from atoll.node.islands import rendezvous
from atoll.node.islands.rendezvous import Rendezvous, gather
from atoll.node.islands.rendezvous_server import Joined
from atoll.node.islands.restart_history import RestartHistory
from atoll.plan.pipelines import PipelinePlan
from tests.node.islands.rendezvous_servers import Opened, hub, next_of, opened

__all__ = ["hub", "opened"]


def job(*, on_loss: str = "shrink", inner: str = "fsdp", ranks: int = 6, **mesh: int) -> JobSpec:
    return JobSpec(
        strategy=StrategyTable(inner=inner),
        island=IslandTable(ranks=ranks, mesh=mesh, machines=3, on_loss=on_loss),
        train=TrainTable(batch=12),
    )


def formed(
    opened: Opened, spec: JobSpec, *, row: int = 0, first: bool = False
) -> Rendezvous | None:
    return gather(
        opened.server,
        spec,
        RestartHistory(row),
        first=first,
        news=opened.news,
        should_stop=lambda: False,
    )


def test_an_island_starts_with_the_machines_that_are_in_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FOLLOWERS_S", 0.3)
    links = [opened.come("w1.2")]
    next_of(opened.news, Joined)
    two = formed(opened, job())
    assert two is not None
    assert (two.shape, two.runs) == (MeshShape(shard=4), [range(2), range(2, 4)])
    assert [follower.part for follower in two.followers] == [2]
    assert two.address == "127.0.0.1"
    links.append(opened.come("w1.1"))
    next_of(opened.news, Joined)
    all_ = formed(opened, job(on_loss="wait"), first=True)
    assert all_ is not None
    assert all_.runs == [range(2), range(2, 4), range(4, 6)]
    assert [follower.part for follower in all_.followers] == [1, 2]
    fewer = formed(opened, job(), row=3)  # ranks were lost again and again, machines were not
    assert fewer is not None
    assert fewer.runs == [range(2), range(2, 3), range(3, 4)]  # 5 would not divide the rows
    least = formed(opened, job(ranks=3), row=9)
    assert least is not None
    assert (least.runs, least.followers) == ([range(1)], ())
    for link in links:
        link.close()


def test_an_elastic_island_starts_by_the_plan_of_its_machines(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FOLLOWERS_S", 0.3)
    spec = JobSpec(
        strategy=StrategyTable(inner="pipeline"),
        island=IslandTable(ranks=3, machines=3, elastic=True),
    )
    plans = {
        ranks: PipelinePlan(
            stages=ranks, replicas=1, rows=1, microbatches=4, cuts=(), predicted_s=1.0,
            reduce_s=0.0, worst_bytes=0,
        )
        for ranks in (2, 3)
    }  # fmt: skip
    link = opened.come("w1.2")
    next_of(opened.news, Joined)
    found = gather(
        opened.server, spec, RestartHistory(), first=False, news=opened.news,
        should_stop=lambda: False, plans=plans,
    )  # fmt: skip
    assert found is not None
    assert (found.plan, found.shape, found.runs) == (
        plans[2], MeshShape(pipeline=2), [range(1), range(1, 2)],
    )  # fmt: skip
    assert [follower.part for follower in found.known] == [2]
    link.close()


@pytest.mark.parametrize(
    "spec",
    [job(on_loss="wait"), job(inner="pipeline", ranks=0, pipeline=3), job()],
    ids=["wait", "whole model", "first"],
)
def test_island_waits_while_it_may_not_or_cannot_start_with_less(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, spec: JobSpec
) -> None:
    monkeypatch.setattr(rendezvous, "FOLLOWERS_S", 0.0)
    deadline = time.monotonic() + 0.5
    first = spec == job()
    found = gather(
        opened.server, spec, RestartHistory(), first=first, news=opened.news,
        should_stop=lambda: time.monotonic() > deadline,
    )  # fmt: skip
    assert found is None


def test_ranks_are_dealt_in_runs_as_evenly_as_can_be() -> None:
    assert split_ranks(4, machines=2) == [range(2), range(2, 4)]
    assert split_ranks(5, machines=3) == [range(2), range(2, 4), range(4, 5)]
    assert split_ranks(3, machines=1) == [range(3)]
