"""A quorum: how long rounds wait for the rest, and what a join of many costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.rounds.effects import Effect, Planned
from atoll.rounds.machine import RoundMachine
from atoll.rounds.timing import RoundTimings, quorum_grace_s
from atoll.wire.messages import RoundJoin, RoundPlan
from atoll.wire.states import RoundMemberState
from tests.rounds.rounds_by_hand import commit_all, join_all, plan_in, rounds_of

PERIOD_S = 100.0


def trained(count: int, *, quorum: float) -> RoundMachine:
    """Return a machine after two rounds of all members, a period of 100 s apart."""
    machine = rounds_of(count)
    machine.quorum = quorum
    names = [f"w{slot}" for slot in range(count)]
    base = "b"
    for now in (0.0, PERIOD_S):
        base = commit_all(machine, join_all(machine, names, now, base), now).digest
    return machine


def joined(machine: RoundMachine, names: Sequence[str], now: float) -> list[Effect]:
    effects: list[Effect] = []
    for name in names:
        effects = machine.join(name, RoundJoin(2, "d"), now)
    return effects


def planned(effects: Sequence[Effect]) -> RoundPlan | None:
    return next((one.plan for one in effects if isinstance(one, Planned)), None)


def test_a_quorum_waits_as_long_as_the_rest_is_worth() -> None:
    machine = trained(8, quorum=0.75)
    now, others = 2 * PERIOD_S, [f"w{slot}" for slot in range(7)]
    assert planned(joined(machine, others, now)) is None
    grace_s = quorum_grace_s(machine.commit_log.timings, waiting=7, missing=1)
    assert grace_s is not None
    assert grace_s == pytest.approx(PERIOD_S / 7)
    assert planned(machine.settle(now + grace_s - 0.1)) is None
    plan = plan_in(machine.settle(now + grace_s + 0.1))
    assert plan.members == others
    assert machine.members.states["w7"] == RoundMemberState.AWAY


def test_below_the_quorum_rounds_wait_as_without_one() -> None:
    machine, plain = trained(4, quorum=0.75), trained(4, quorum=0.0)
    now = 2 * PERIOD_S
    for one in (machine, plain):
        joined(one, ["w0", "w1"], now)
    deadlines = plain.awaited_until()
    assert machine.awaited_until() == deadlines
    before = min(deadlines.values()) - 0.1
    assert planned(machine.settle(before)) is None
    assert planned(plain.settle(before)) is None


def test_a_quorum_does_not_hold_up_those_that_are_all_there() -> None:
    machine = trained(3, quorum=0.5)
    plan = plan_in(joined(machine, ["w0", "w1", "w2"], 2 * PERIOD_S))
    assert plan.members == ["w0", "w1", "w2"]


def test_whoever_recovers_is_not_punished_by_a_quorum() -> None:
    machine = trained(4, quorum=0.75)
    now = 2 * PERIOD_S
    machine.recover("w3", now)
    joined(machine, ["w0", "w1", "w2"], now)
    assert plan_in(machine.settle(now + 40.0)).members == ["w0", "w1", "w2"]
    assert machine.members.states["w3"] == RoundMemberState.RECOVERING
    assert machine.members.is_recovering("w3", machine.committed_round)


def test_without_a_measured_period_no_grace_is_known() -> None:
    assert quorum_grace_s(RoundTimings(), waiting=3, missing=1) is None


def test_a_quorum_is_refused_where_members_meet_every_step() -> None:
    text = '[job]\nquorum = 0.9\n[strategy]\npreset = "ddp"\n'
    with pytest.raises(ConfigError, match="outer step"):
        parse_spec(text)
    assert parse_spec(text.replace("ddp", "diloco")).job.quorum == 0.9


def looks_at_members(count: int) -> int:
    """Return how often a round of `count` members asks for a member's deadline."""
    calls = 0

    class Counting(RoundMachine):
        def deadline_of(self, member: str) -> float | None:
            nonlocal calls
            calls += 1
            return super().deadline_of(member)

    machine = Counting("j", nodes_wanted=count, preference="relay", reducer_ready=True)
    names = [f"w{slot}" for slot in range(count)]
    for name in names:
        machine.expect(name)
        machine.register(name, dial=[])
    commit_all(machine, join_all(machine, names, 0.0), 1.0)
    return calls


def test_a_join_looks_at_few_members_however_many_there_are() -> None:
    assert looks_at_members(400) < 5 * looks_at_members(100)
