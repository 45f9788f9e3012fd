from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import psutil
import pytest
import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, GroupError, PeerLost
from atoll.group.base import Group, Reduced, Work, flatten, unflatten
from atoll.group.in_process.groups import MemoryGroup, MemoryGroups
from atoll.group.period import PeriodReport
from atoll.group.routes.direct import DirectRoute
from atoll.group.routes.requests import ReduceRequest
from atoll.wire.messages import RoundPlan
from bench.kit.ports import free_port
from tests.contracts.group_suite import Build, GroupSuite, one_round, together, values
from tests.group.meeting_place import direct_route
from tests.patience import PATIENCE_S, PROMPT_S

T = TypeVar("T")


class DirectMember(MemoryGroup):
    """Meets at a table in memory, reduces over sockets."""

    route: DirectRoute
    world: DirectWorld

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        plan = super().join(report, deadline=deadline)
        return msgspec.structs.replace(plan, route="direct") if len(plan.members) > 1 else plan

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        plan = self._joined().plan
        if plan.route == "alone":
            return super().reduce(xs, codec=codec, weight=weight, key=key)
        self._codec = codec
        plan = msgspec.structs.replace(
            plan, route="direct", store=self.world.routes[plan.members[0]].dial
        )

        serial = self.route.begin()

        def body() -> Reduced:
            request = ReduceRequest(
                plan=plan, vector=flatten(xs), codec=codec, weight=weight, key=key, serial=serial
            )
            out = self.route.exchange(request)
            self.sent_bytes += out.sent_bytes
            self.received_bytes += out.received_bytes
            return Reduced(
                unflatten(out.vector, xs), out.contributors, out.weight,
                out.sent_bytes, out.received_bytes, out.digest,
            )  # fmt: skip

        work = Work.start(body, name="direct")
        self.world.under_way.append((tuple(plan.members), work))
        if self.world.dead & set(plan.members):
            work.fail(PeerLost("a member was lost before the exchange began"))
        return work


class DirectWorld:
    counts_header_bytes = False

    def __init__(self, n: int, timeout_s: float) -> None:
        self.table = MemoryGroups(n, timeout_s=timeout_s)
        self.routes: dict[str, DirectRoute] = {}
        self.dead: set[str] = set()
        self.under_way: list[tuple[tuple[str, ...], Work[Reduced]]] = []
        for group in self.table:
            group.__class__ = DirectMember
            assert isinstance(group, DirectMember)
            group.world = self
            group.route = direct_route(group.me)
            self.routes[group.me] = group.route

    def run(self, function: Callable[[Group], T]) -> list[T | BaseException]:
        return self.table.run(function)

    def die(self, group: Group) -> None:
        self.dead.add(group.me)
        self.table.kill(group.me)
        self.routes[group.me].close()
        for members, work in self.under_way:  # what the hub's notice of that attempt does
            if group.me in members:
                work.fail(PeerLost("the hub lost a member", given=group.me))

    def close(self) -> None:
        for route in self.routes.values():
            route.close()


@pytest.fixture
def build() -> Iterator[Build]:
    worlds: list[DirectWorld] = []

    def make(n: int, *, timeout_s: float = PATIENCE_S) -> DirectWorld:
        worlds.append(DirectWorld(n, timeout_s))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


class TestDirect(GroupSuite):
    pass


def test_group_is_reused_while_the_members_are_the_same(build: Build) -> None:
    world = build(3)
    assert isinstance(world, DirectWorld)
    seen: dict[str, list[object]] = {"w0": [], "w1": [], "w2": []}

    def member(group: Group) -> None:
        for round_ in range(3):
            one_round(group, values(group.me, (50,)), round_=round_)
            seen[group.me].append(world.routes[group.me]._group)

    together(world, member)
    for groups in seen.values():
        assert groups[0] is not None
        assert groups[0] is groups[1] is groups[2]


def test_restarted_member_is_met_again_without_losing_the_round(build: Build) -> None:
    """The survivors' connections are stale: they connect anew within the same attempt."""
    world = build(3)
    assert isinstance(world, DirectWorld)

    together(world, lambda group: one_round(group, values(group.me, (5000,)), round_=0))
    world.routes["w1"].close()
    route = world.routes["w1"] = direct_route("w1")
    member = world.table[1]
    assert isinstance(member, DirectMember)
    member.route = route
    results = together(world, lambda g: one_round(g, values(g.me, (5000,)), round_=1))
    assert {agreed.attempts for agreed in results} == {1}
    assert results[0].reduced.contributors == ("w0", "w1", "w2")


def lone_plan(route: DirectRoute, *, timeout_s: float) -> RoundPlan:
    return RoundPlan(
        job="job", round=0, epoch=1, members=["w0", "w1"], route="direct", store=route.dial,
        timeout_s=timeout_s,
    )  # fmt: skip


def ones(route: DirectRoute, plan: RoundPlan) -> ReduceRequest:
    return ReduceRequest(
        plan=plan, vector=torch.ones(4), codec=make_codec("fp32"), weight=1.0, key="x",
        serial=route.begin(),
    )  # fmt: skip


def test_absent_peer_ends_the_exchange_at_its_deadline() -> None:
    route = direct_route("w0")
    began = time.monotonic()
    with pytest.raises((DeadlineExceeded, PeerLost)):
        route.exchange(ones(route, lone_plan(route, timeout_s=1.0)))
    assert time.monotonic() - began < PROMPT_S
    route.close()


def test_store_that_nobody_serves_is_an_error_and_not_a_hang() -> None:
    route = direct_route("w1")
    dial = f"127.0.0.1:{free_port()}"
    plan = msgspec.structs.replace(lone_plan(route, timeout_s=1.0), store=dial)
    began = time.monotonic()
    with pytest.raises(GroupError):
        route.exchange(ones(route, plan))
    assert time.monotonic() - began < PROMPT_S
    route.close()


def test_store_listens_on_the_given_address_only() -> None:
    route = direct_route("w0", address="127.0.0.2")
    host, _, port = route.dial.rpartition(":")
    assert host == "127.0.0.2"
    with socket.create_connection((host, int(port)), timeout=2):
        pass
    mine = psutil.Process().net_connections(kind="tcp")
    listening = {c.laddr.ip for c in mine if c.status == "LISTEN" and c.laddr.port == int(port)}
    assert listening == {"127.0.0.2"}
    route.close()
