"""A member over the hub that leaves, recovers or is kept waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import GroupError, GroupLeft, HubError
from atoll.group.base import Group, Work
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedMean
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import Lease, Message, RoundJoin, RoundPlan
from tests.contracts.group_suite import one_round, together, values
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.net.small_hub import SmallHub, answer, linked
from tests.patience import PATIENCE_S, PROMPT_S


@pytest.fixture
def world(node: NodeInName) -> Iterator[Callable[..., HubWorld]]:
    worlds: list[HubWorld] = []

    def make(n: int, *, route: str = "relay", **options: Any) -> HubWorld:
        worlds.append(HubWorld(node, n, route=route, **options))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


def kinds(hub: HubServer, job: str) -> list[str]:
    with HubClient(hub.url, hub.operator_token) as client:
        return [event["kind"] for event in client.events(job)["events"]]


def meet(group: Group) -> CommittedMean:
    return one_round(group, values(group.me, (500,)))


@pytest.mark.parametrize("route", ["relay", "direct"])
@pytest.mark.every(2)
def test_waiting_member_leaves_at_once(world: Callable[..., HubWorld], route: str) -> None:
    here = world(3, route=route)
    together(here, meet)
    leaver = here.groups[2]
    waiting = Work.start(lambda: meet(leaver), name="waits")
    while not leaver._requests._open:
        threading.Event().wait(0.002)
    began = time.monotonic()
    leaver.leave("preempted", timeout_s=PATIENCE_S)
    with pytest.raises(GroupLeft):
        waiting.wait(PATIENCE_S)
    assert time.monotonic() - began < PROMPT_S
    with pytest.raises(GroupLeft):
        leaver.join(PeriodReport(1, "base"))
    work = [Work.start(lambda g=g: meet(g), name=g.me) for g in here.groups[:2]]  # type: ignore[misc]
    for each in work:
        agreed = each.wait(PATIENCE_S)
        assert agreed.plan.members == ["w0", "w1"]
        assert agreed.attempts == 1


@pytest.mark.parametrize("route", ["relay", "direct"])
@pytest.mark.every(2)
def test_round_under_way_ends_before_a_member_leaves(
    world: Callable[..., HubWorld], route: str
) -> None:
    here = world(3, route=route)
    leaving: list[Work[None]] = []

    def member(group: Group) -> bool:
        group.join(PeriodReport(0, "base"))
        work = group.reduce(values(group.me, (500,)), codec=make_codec("fp32"), weight=1.0)
        if group.me == "w2":
            leave = partial(group.leave, "preempted", timeout_s=PATIENCE_S)
            leaving.append(Work.start(leave, name="leave"))
        return group.commit(work.wait()).committed

    assert together(here, member) == [True, True, True]
    leaving[0].wait(PATIENCE_S)
    with pytest.raises(GroupLeft):
        here.groups[2].join(PeriodReport(1, "base"))


@pytest.mark.parametrize("route", ["relay", "direct", "auto"])
@pytest.mark.every(3)
def test_endless_round_is_abandoned_within_five_seconds(
    world: Callable[..., HubWorld], route: str
) -> None:
    """One member hangs; the one that leaves abandons the round, and the third retries alone."""
    sites = [("w0", "w2"), ("w1",)] if route == "auto" else ()
    here = world(3, route=route, sites=sites)
    released = threading.Event()
    times: dict[str, float] = {}

    def member(group: Group) -> str:
        plan = group.join(PeriodReport(0, "base"))
        if group.me == "w1":
            released.wait(PATIENCE_S)
            return plan.route
        work = group.reduce(values(group.me, (500,)), codec=make_codec("fp32"), weight=1.0)
        if group.me == "w2":
            began = time.monotonic()
            group.leave("preempted")
            times["leave"] = time.monotonic() - began
            with pytest.raises(GroupLeft):
                work.wait(PATIENCE_S)
            with pytest.raises(GroupLeft):
                group.commit(None, ok=False)
            released.set()
        return plan.route

    routes = together(here, member)
    assert routes[0] == {"auto": "hierarchical"}.get(route, route)
    assert times["leave"] < PROMPT_S


def test_recovering_member_is_told_who_stands_and_told_of(
    world: Callable[..., HubWorld], hub: HubServer
) -> None:
    here = world(3)

    def first(group: Group) -> CommittedMean:
        assert isinstance(group, HubGroup)
        group.register(state=[f"127.0.0.1:{1000 + int(group.me[1:])}"])
        return meet(group)

    together(here, first)
    group = here.groups[1]
    group.committed_round = 0
    sources = group.recover()
    assert group.committed_round == sources.round == 1
    assert [(peer.member, peer.state) for peer in sources.peers] == [
        ("w0", ["127.0.0.1:1000"]),
        ("w2", ["127.0.0.1:1002"]),
    ]
    assert [peer.member for peer in group.recover(failed=["w0"]).peers] == ["w2"]
    group.standing(1, base="base", sources=["w2"], seconds=0.5, nbytes=10)
    assert {agreed.plan.round for agreed in together(here, meet)} == {1}


def test_leases_and_pace_come_with_the_verdict(world: Callable[..., HubWorld]) -> None:
    here = world(2)

    def member(group: Group) -> CommittedMean:
        slot = int(group.me[1:])
        group.join(PeriodReport(0, "base", steps=10, busy_s=1.0, lease=Lease(slot, cursor(slot))))
        reduced = group.reduce([torch.ones(3)], codec=make_codec("fp32"), weight=1.0).wait()
        verdict = group.commit(reduced, lease=Lease(slot, cursor(slot)))
        assert verdict.leases == {f"w{i}": Lease(i, cursor(i)) for i in range(2)}
        return meet(group)

    together(here, member)


def cursor(slot: int) -> dict[str, int]:
    return {"slot": slot, "data_pass": 0, "offset": 7 + slot}


def test_leaving_without_a_hub_takes_no_longer(tmp_path: Path) -> None:
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        here = HubWorld(node, 1, route="relay")
        together(here, meet)
    began = time.monotonic()
    here.groups[0].leave("preempted", timeout_s=1.0)
    assert time.monotonic() - began < PROMPT_S
    with pytest.raises(GroupLeft):
        here.groups[0].join(PeriodReport(1, "base"))
    here.close()
    node.link.close()


def test_closed_link_ends_a_waiting_join(world: Callable[..., HubWorld]) -> None:
    here = world(2)
    waiting = Work.start(lambda: meet(here.groups[0]), name="waits")
    while not here.groups[0]._requests._open:
        threading.Event().wait(0.002)
    here.links.pop("w0").close()
    with pytest.raises(HubError):
        waiting.wait(PATIENCE_S)


def test_plan_without_this_member_keeps_no_leave_waiting() -> None:
    def plan_others(body: Message) -> Message:
        if not isinstance(body, RoundJoin):
            return answer(body)
        return RoundPlan(job="job", round=0, epoch=1, members=["w1"], route="relay")

    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        hub.answer = plan_others
        group = HubGroup(link, job="job", member="w0", hub=hub.url, route="relay")
        with pytest.raises(GroupError, match="without this member"):
            group.join(PeriodReport(0, "base"))
        assert group._decided.is_set()
        group.close()
