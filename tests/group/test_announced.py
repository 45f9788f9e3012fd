"""Joins in advance: a round waits for no plan that could be asked for during the steps before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded, LeftBehind
from atoll.group.announced import AnnouncedJoin
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedMean
from atoll.wire.messages import RoundPlan, RoundVote
from tests.contracts.group_suite import one_round, together, values
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.group.test_first_round import Counts
from tests.patience import PATIENCE_S

REPORT = PeriodReport(1, "base", tokens=100, steps=10, busy_s=1.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HubWorld]:
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        world = HubWorld(node, 3, route="direct")
        yield world
        world.close()
        node.link.close()


def rounds(world: HubWorld) -> list[CommittedMean]:
    return together(world, lambda group: one_round(group, values(group.me, (1000,))))


def announce(group: HubGroup) -> RoundPlan:
    group.announce(replace(REPORT, round=group.committed_round))
    assert group._announced._requested is not None
    return group._announced._requested.wait(PATIENCE_S)


def test_an_announced_round_waits_for_the_verdict_only(
    world: HubWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds(world)
    together(world, announce)  # type: ignore[arg-type]
    counts = Counts(monkeypatch)
    done = rounds(world)
    assert (dict(counts.requests), counts.connected) == ({RoundVote: 3}, 0)
    assert {each.plan.round for each in done} == {1}
    assert all(each.attempts == 1 for each in done)
    newest = PeriodReport(1, "base").as_join()
    assert [body.report for body in counts.bodies if isinstance(body, RoundVote)] == [newest] * 3
    counts.bodies.clear()
    rounds(world)  # asks for its plan again, which is the newest report
    assert [body.report for body in counts.bodies if isinstance(body, RoundVote)] == [None] * 3


def test_a_plan_that_was_aborted_meanwhile_is_asked_for_again(world: HubWorld) -> None:
    rounds(world)
    together(world, announce)  # type: ignore[arg-type]
    last = world.groups[2]
    world.die(last)
    world.groups = world.groups[:2]
    for each in rounds(world):
        assert each.plan.members in (["w0", "w1"], ["w0", "w1", "w2"])
        assert list(each.reduced.contributors) == ["w0", "w1"]


def test_only_the_announced_round_takes_the_plan() -> None:
    plan = RoundPlan("job", 1, 7, ["w0"], "alone")
    join = AnnouncedJoin()
    join.ask(1, lambda: plan)
    join.ask(1, lambda: pytest.fail("asked twice"))
    assert join.take(REPORT) is plan
    assert join.report == REPORT.as_join()
    assert join.take(REPORT) is None
    assert join.report is None
    join.ask(2, lambda: plan)
    assert join.take(REPORT) is None
    join.ask(1, lambda: plan)
    join.aborted(7)
    assert join.take(REPORT) is None
    join.ask(1, lambda: plan)
    join.forget()
    assert join.take(REPORT) is None


def test_the_hubs_error_is_that_of_the_join() -> None:
    def ask() -> RoundPlan:
        raise LeftBehind("the others went on")

    join = AnnouncedJoin()
    join.ask(1, ask)
    with pytest.raises(LeftBehind, match="went on"):
        join.take(REPORT)


def test_the_wait_for_an_announced_plan_ends_at_its_deadline() -> None:
    gate = threading.Event()

    def ask() -> RoundPlan:
        gate.wait(PATIENCE_S)
        return RoundPlan("job", 1, 7, ["w0"], "alone")

    join = AnnouncedJoin()
    join.ask(1, ask)
    with pytest.raises(DeadlineExceeded):
        join.take(REPORT, deadline=RealClock().monotonic())
    gate.set()
