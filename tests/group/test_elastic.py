"""Members in memory that come, go, lag, pause and recover."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, GroupLeft, LeftBehind, PeerLost
from atoll.group.base import Group, Work
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.period import PeriodReport
from atoll.group.run_round import CommittedMean, CommittedRound, mean_exchange, run_round
from atoll.wire.messages import Lease, Registered
from tests.patience import PATIENCE_S, PROMPT_S


def meet(group: Group, *, lease: Lease | None = None, value: float = 1.0) -> CommittedMean:
    return run_round(
        group,
        mean_exchange(group, [torch.full((3,), value)], codec=make_codec("fp32"), weight=1.0),
        PeriodReport(group.committed_round, "b", lease=lease),
    )


def later(function: Callable[[], CommittedMean]) -> Work[CommittedMean]:
    return Work.start(function, name="later")


def joined(groups: MemoryGroups, member: str) -> None:
    """Wait until a member waits in a join."""
    deadline = time.monotonic() + PATIENCE_S
    while member not in groups.coordinator.machine.joins:
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def limit(groups: MemoryGroups, **waits: float) -> None:
    """Change time limits, now that nobody who keeps to them is still to come."""
    coordinator = groups.coordinator
    with coordinator.changed:
        machine = coordinator.machine
        assert machine.waits is not None
        machine.waits = replace(machine.waits, **waits)
        coordinator.timeout_s = machine.waits.timeout_s
        coordinator.changed.notify_all()  # those that wait look at the clock again


def test_newcomer_recovers_from_those_who_stand_and_takes_part() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)
    groups[1].register(state=["10.0.0.1:5"])
    groups.together(meet)
    new = groups.add()
    assert new.register() == Registered(
        slot=3, num_slots=4, committed_round=1, stopping=False, recover=True
    )
    sources = new.recover()
    assert [source.member for source in sources.peers] == ["w0", "w1", "w2"]
    assert sources.peers[1].state == ["10.0.0.1:5"]
    assert new.committed_round == sources.round == 1
    assert [s.member for s in new.recover(failed=["w0", "w2"]).peers] == ["w1"]
    assert len(new.recover(failed=["w0", "w1", "w2"]).peers) == 3
    new.standing(1, base="b", sources=["w1"])
    assert groups.together(meet)[3].reduced.contributors == ("w0", "w1", "w2", "w3")


def test_rounds_wait_for_who_recovers_and_only_so_long() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S, hold_s=PATIENCE_S)
    groups.together(meet)
    new = groups.add()
    new.recover()
    work = [later(lambda g=g: meet(g)) for g in (groups[0], groups[1])]  # type: ignore[misc]
    joined(groups, "w1")
    new.standing(1, base="b")
    assert meet(new).plan.members == ["w0", "w1", "w2"]
    assert all(each.wait(PATIENCE_S).attempts == 1 for each in work)
    limit(groups, hold_s=0.3)
    began = time.monotonic()
    new.recover()
    work = [later(lambda g=g: meet(g)) for g in (groups[0], groups[1])]  # type: ignore[misc]
    assert [each.wait(PATIENCE_S).plan.members for each in work] == [["w0", "w1"]] * 2
    assert 0.3 <= time.monotonic() - began < PROMPT_S
    with pytest.raises(LeftBehind):
        new.join(PeriodReport(2, "b"))


def test_state_without_holders_comes_from_the_checkpoint() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups.coordinator.checkpoint_round = 1
    for _ in range(3):
        groups.together(meet)
    for member in ("w0", "w1"):
        groups.kill(member)
    first, second = groups.add("w0"), groups.add("w1")
    for group in (first, second):
        sources = group.recover()
        assert (sources.round, sources.peers, sources.checkpoint_round) == (1, [], 1)
    for group in (first, second):
        group.standing(1, base="b")
    assert {a.plan.round for a in groups.together(meet)} == {1}


def test_lagging_member_is_left_out_and_recovers() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)
    quick = [later(lambda g=g: meet(g)) for g in (groups[0], groups[1])]  # type: ignore[misc]
    joined(groups, "w0")
    joined(groups, "w1")
    limit(groups, grace_s=0.2)
    assert [each.wait(PATIENCE_S).plan.members for each in quick] == [["w0", "w1"]] * 2
    limit(groups, grace_s=math.inf)
    with pytest.raises(LeftBehind):
        meet(groups[2])
    assert groups[2].recover().round == 1
    groups[2].standing(1, base="b")
    assert groups.together(meet)[2].plan.members == ["w0", "w1", "w2"]


def test_frozen_member_delays_no_round_and_learns_of_it() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)
    frozen = threading.Event()

    def member(group: Group) -> CommittedMean:
        if group.me == "w2":
            group.join(PeriodReport(0, "b"))
            groups.lose("w2")
            assert frozen.wait(PATIENCE_S)
        return meet(group)

    work = [Work.start(lambda g=g: member(g), name=g.me) for g in groups]  # type: ignore[misc]
    assert work[0].wait(PATIENCE_S).reduced.contributors == ("w0", "w1")
    frozen.set()
    with pytest.raises(LeftBehind):
        work[2].wait(PATIENCE_S)


def test_paused_group_waits_and_continues_by_itself() -> None:
    groups = MemoryGroups(2, timeout_s=0.2, min_members=2)
    groups.kill("w1")
    work = later(lambda: meet(groups[0]))
    deadline = time.monotonic() + PATIENCE_S
    while not groups.coordinator.machine.paused:
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
    with pytest.raises(DeadlineExceeded):
        work.wait(0.6)
    assert not work.done()
    limit(groups, timeout_s=PATIENCE_S)
    new = groups.add("w1")
    assert meet(new).plan.members == ["w0", "w1"]
    assert work.wait(PATIENCE_S).plan.members == ["w0", "w1"]
    assert not groups.coordinator.machine.paused


def test_waiting_member_can_leave_a_paused_group() -> None:
    groups = MemoryGroups(1, timeout_s=0.2, min_members=2)
    work = later(lambda: meet(groups[0]))
    joined(groups, "w0")
    groups[0].leave("preempted")
    assert groups[0].leaving
    with pytest.raises(GroupLeft, match="preempted"):
        work.wait(PATIENCE_S)
    with pytest.raises(GroupLeft):
        groups[0].join(PeriodReport(0, "b"))


def test_leaving_lets_the_round_under_way_end() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)

    def member(group: Group) -> CommittedMean:
        plan = group.join(PeriodReport(0, "b"))
        reduced = group.reduce([torch.ones(2)], codec=make_codec("fp32"), weight=1.0).wait()
        if group.me == "w1":
            leave = partial(group.leave, "preempted", timeout_s=PATIENCE_S)
            work = Work.start(leave, name="leave")
            while not group.leaving:
                threading.Event().wait(0.002)
        verdict = group.commit(reduced)
        if group.me == "w1":
            work.wait(PATIENCE_S)
        return CommittedMean(reduced, plan, verdict, {}, 1, 0, 0)

    assert all(agreed.verdict.committed for agreed in groups.together(member))
    assert meet(groups[0]).plan.members == ["w0"]


def test_leaving_abandons_a_round_that_does_not_end() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups_joined = threading.Barrier(2)

    def absent() -> None:
        groups[1].join(PeriodReport(0, "b"))
        groups_joined.wait(PATIENCE_S)

    stuck = Work.start(absent, name="absent")
    plan = groups[0].join(PeriodReport(0, "b"))
    groups_joined.wait(PATIENCE_S)
    stuck.wait(PATIENCE_S)
    work = groups[0].reduce([torch.ones(2)], codec=make_codec("fp32"), weight=1.0)
    began = time.monotonic()
    groups[0].leave("preempted", timeout_s=0.5)
    with pytest.raises(GroupLeft):
        work.wait(PATIENCE_S)
    with pytest.raises(GroupLeft):
        groups[0].commit(None, ok=False)
    assert time.monotonic() - began < PROMPT_S
    assert plan.members == ["w0", "w1"]


@pytest.mark.parametrize("phase", ["recover", "standing"])
def test_newcomer_killed_while_it_recovers_holds_nobody_up(phase: str) -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups.together(meet)
    new = groups.add()
    groups.kill("w2", at=phase)
    if phase == "standing":
        new.recover()
    with pytest.raises(PeerLost):
        new.recover() if phase == "recover" else new.standing(1, base="b")
    work = [later(lambda g=g: meet(g)) for g in (groups[0], groups[1])]  # type: ignore[misc]
    assert all(each.wait(PATIENCE_S).plan.members == ["w0", "w1"] for each in work)


def test_vote_against_a_round_frees_the_others_at_once() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def member(group: Group) -> CommittedMean:
        if group.me == "w1":
            group.join(PeriodReport(0, "b"))
            assert not group.commit(None, ok=False, reason="no room").committed
        return meet(group)

    began = time.monotonic()
    assert [agreed.attempts for agreed in groups.together(member)] == [2, 1, 2]
    assert time.monotonic() - began < PROMPT_S


def test_nobody_holds_up_the_others_twice() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def member(group: Group) -> CommittedMean:
        for _ in range(2):
            if group.me == "w1":
                group.join(PeriodReport(0, "b"))
                group.commit(None, ok=False, reason="never well")
        return meet(group)

    first, sick, last = groups.run(member)
    assert isinstance(first, CommittedRound)
    assert isinstance(last, CommittedRound)
    assert first.reduced.contributors == ("w0", "w2")
    assert isinstance(sick, LeftBehind)


def cursor(offset: int) -> dict[str, int]:
    return {"data_pass": 0, "offset": offset}


def test_leases_follow_contributors_without_duplicates() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def first(group: Group) -> CommittedMean:
        return meet(group, lease=Lease(int(group.me[1:]), cursor(10 + int(group.me[1:]))))

    leases = groups.together(first)[0].verdict.leases
    assert leases == {f"w{i}": Lease(i, cursor(10 + i)) for i in range(3)}
    groups.kill("w1")

    def second(group: Group, behind: int) -> CommittedMean:
        lease = leases[group.me]
        return meet(group, lease=Lease(lease.slot, cursor(behind)))

    both = (groups[0], 20), (groups[2], 22)
    work = [later(lambda g=g, o=o: second(g, o)) for g, o in both]  # type: ignore[misc]
    agreed = [each.wait(PATIENCE_S) for each in work]
    leases = agreed[0].verdict.leases
    assert set(leases) == {"w0", "w2"}
    assert {lease.slot for lease in leases.values()} == {0, 1}, "the slot that lags goes first"
    assert leases["w0"] == Lease(0, cursor(20))
    assert agreed[1].lease == Lease(1, cursor(11))
    new = groups.add("w1")
    assert new.recover().lease == Lease(2, cursor(22))


def test_pace_of_a_test_is_told_with_the_verdict() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups.coordinator.paces = {"w1": 0.5}
    assert [agreed.pace for agreed in groups.together(meet)] == [1.0, 0.5]


def test_start_round_is_where_members_begin() -> None:
    groups = MemoryGroups(2, start_round=7)
    assert [group.committed_round for group in groups] == [7, 7]
    assert not groups[0].register().recover
    assert groups.together(meet)[0].plan.round == 7
