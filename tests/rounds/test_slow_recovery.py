"""A member whose line is slower than the rounds: it comes back, and at what cost."""

from __future__ import annotations

import pytest

from atoll.rounds.effects import Effect, EventRaised, Planned
from atoll.rounds.machine import HOLD_MARGIN, RoundMachine
from atoll.wire.messages import RoundJoin
from atoll.wire.states import RoundMemberState
from tests.rounds.rounds_by_hand import commit_all, join_all, plan_in, rounds_of

PERIOD_S, FETCH_S = 20.0, 100.0


def behind(others: int) -> tuple[RoundMachine, float]:
    """Return a group whose last member has just fallen behind, and the time."""
    machine, now = rounds_of(others + 1), 0.0
    for _ in range(3):
        now += PERIOD_S
        everyone = [f"w{slot}" for slot in range(others + 1)]
        commit_all(machine, join_all(machine, everyone, now), now)
    machine.silent(f"w{others}", now)
    machine.recover(f"w{others}", now)
    return machine, now


@pytest.mark.parametrize("others", [1, 2, 4])
def test_a_slow_line_is_waited_for_once_that_costs_no_more(others: int) -> None:
    """The state takes 100 s to fetch, and a newer one is committed every 20 s."""
    machine, now = behind(others)
    names, late, began = [f"w{slot}" for slot in range(others)], f"w{others}", now
    events: list[str] = []
    fetched, wanted, trained = now + FETCH_S, machine.committed_round, now + PERIOD_S
    while machine.members.states[late] == RoundMemberState.RECOVERING:
        now += 1.0
        assert now < began + 20 * FETCH_S, "it never recovers"
        effects: list[Effect] = []
        if now >= trained and machine.attempt is None:
            for name in names:
                if name not in machine.joins:
                    effects += machine.join(name, RoundJoin(machine.committed_round, "d"), now)
        effects += machine.settle(now)
        plans = [effect.plan for effect in effects if isinstance(effect, Planned)]
        if plans and late not in plans[0].members:
            commit_all(machine, plans[0], now)
            trained = now + PERIOD_S
        if now >= fetched and machine.committed_round == wanted:
            effects += machine.stand(late, wanted, "d", now)
        elif now >= fetched:
            effects += machine.recover(late, now, needs_s=FETCH_S)
            fetched, wanted = now + FETCH_S, machine.committed_round
        events += [e.kind for e in effects if isinstance(e, EventRaised)]
    assert events.count("waits-to-recover") == 1
    effects = machine.settle(now + 1.0)  # it takes part, although the others have waited for long
    effects += machine.join(late, RoundJoin(machine.committed_round, "d"), now + 1.5)
    assert late in plan_in(effects).members
    assert now - began <= (others + 2) * FETCH_S


def test_a_wait_in_vain_has_to_be_earned_twice_over() -> None:
    machine, now = behind(1)
    waits: list[float] = []
    for _ in range(12):
        now += FETCH_S
        began = now
        effects = machine.recover("w1", now, needs_s=FETCH_S)
        if any(isinstance(e, EventRaised) and e.kind == "waits-to-recover" for e in effects):
            waits.append(began)
            machine.join("w0", RoundJoin(machine.committed_round, "d"), now)
            assert machine.settle(now + FETCH_S) == []  # it waits for as long as that took
            now += HOLD_MARGIN * FETCH_S + 1.0
            commit_all(machine, plan_in(machine.settle(now)), now)
    lost = [began - PERIOD_S * 3 for began in waits]
    assert lost[0] == FETCH_S
    assert all(after >= 2**times * FETCH_S for times, after in enumerate(lost))
    assert (len(waits) - 1) * HOLD_MARGIN * FETCH_S <= lost[-1]  # it cost no more than was lost


def test_needs_below_the_usual_wait_change_nothing() -> None:
    machine, now = behind(1)
    machine.recover("w1", now + 100.0, needs_s=machine.hold_s() / HOLD_MARGIN)
    assert machine.members.holds == {}
