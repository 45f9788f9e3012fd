"""Rounds of `route = "auto"` take the route that was faster when both were tried."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.rounds.effects import EventRaised
from atoll.rounds.faster_route import (
    LEAST_PAUSE,
    LEAST_S,
    LONGEST_PAUSE,
    SMALLER,
    SOON,
    FasterRoute,
    failed,
    learn,
)
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import RoundJoin
from tests.rounds.rounds_by_hand import commit_all, plan_in, rounds_of, vote

NBYTES = 8 * 10**6

Seconds = Callable[[int, bool], float]
"""Number of a round, and whether it goes through the hub -> what it takes."""


def rounds(seconds: Seconds, *, count: int, known: FasterRoute | None = None) -> list[bool]:
    """Return which rounds go through the hub."""
    known = known if known is not None else FasterRoute()
    found = []
    for number in range(count):
        relay = known.through_hub
        found.append(relay)
        took = seconds(number, relay)
        learn(known, relay=relay, seconds=took, nbytes=NBYTES, round_=number)
    return found


def test_the_hub_is_tried_and_kept_if_it_is_faster() -> None:
    found = rounds(lambda _, relay: 1.5 if relay else 2.0, count=30)
    assert found[:4] == [False, False, True, True]
    assert all(found[2:])


def test_of_long_rounds_one_says_enough_and_is_looked_at_again() -> None:
    found = rounds(lambda _, relay: 4.0 if relay else 6.0, count=30)
    assert found[:3] == [False, True, True]
    assert [number for number, relay in enumerate(found) if not relay] == [0, 1 + SOON]
    first = rounds(lambda number, relay: 4.0 if relay else 3.0 if number else 6.0, count=30)
    assert [number for number, relay in enumerate(first) if relay] == [1, 2, 3, 4]


def test_the_direct_route_is_kept_if_it_is_faster() -> None:
    found = rounds(lambda _, relay: 2.4 if relay else 1.6, count=200)
    assert found[:4] == [False, False, True, True]
    assert found.index(True, 4) == 3 + 50  # two rounds of half as long again, for 2 % of the time
    assert sum(found) <= 2 * (1 + 200 // 50)


def test_a_hub_that_is_much_slower_is_tried_for_one_round() -> None:
    found = rounds(lambda _, relay: 16.0 if relay else 1.6, count=LONGEST_PAUSE)
    assert [number for number, relay in enumerate(found) if relay] == [2, 2 + 900]


def test_short_rounds_never_go_through_the_hub() -> None:
    assert not any(rounds(lambda _, relay: LEAST_S / (2 if relay else 1.01), count=500))


def test_one_disturbed_round_is_no_reason() -> None:
    found = rounds(lambda number, _: 9.0 if number in (1, 3) else 1.0, count=30)
    assert not any(found[4:])


def test_when_lines_change_so_does_the_route() -> None:
    def seconds(number: int, relay: bool) -> float:
        return (1.6 if relay else 2.4) if number < 100 else (3.2 if relay else 2.4)

    found = rounds(seconds, count=200)
    assert all(found[2:34])
    assert sum(found[110:]) <= 2 * 3


@given(
    st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(0.01, 100.0)), min_size=100, max_size=300),
    st.sampled_from([0, NBYTES // 10, NBYTES]),
)
@settings(max_examples=50)
def test_whatever_rounds_take_trials_are_few(times: list[tuple[float, float]], size: int) -> None:
    known, changes = FasterRoute(), 0
    for number, (direct_s, relay_s) in enumerate(times):
        relay, trial = known.through_hub, known.trial
        took, moved = relay_s if relay else direct_s, NBYTES + number % 7 * size
        text = learn(known, relay=relay, seconds=took, nbytes=moved, round_=number)
        changes += trial != known.trial
        assert not text or trial
        assert known.again <= number + LONGEST_PAUSE
        assert msgspec.json.decode(msgspec.json.encode(known), type=FasterRoute) == known
    assert changes <= 2 * (2 + len(times) // LEAST_PAUSE)


def test_rounds_are_compared_by_what_they_move() -> None:
    """An agreement at the start, which waits long, fragments, ends with nothing to send."""
    known, found = FasterRoute(), []
    for number, nbytes in enumerate([100, 0, *[NBYTES, 0, NBYTES * 3 // 2, 100] * 10]):
        relay = known.through_hub
        found.append(relay)
        seconds = 9.0 if nbytes < 1000 else nbytes / NBYTES * (1.6 if relay else 2.4)
        learn(known, relay=relay, seconds=seconds, nbytes=nbytes, round_=number)
    assert found.index(True) == 5  # two of a size that says something have been there
    assert all(found[5:])


def test_when_less_is_moved_from_now_on_that_counts() -> None:
    known = FasterRoute()
    rounds(lambda _, relay: 1.6 if relay else 2.4, count=10, known=known)
    for number in range(10, 10 + SMALLER + LEAST_PAUSE + 10):
        relay = known.through_hub
        seconds = 2.0 if relay else 1.0
        learn(known, relay=relay, seconds=seconds, nbytes=NBYTES // 8, round_=number)
    assert known.nbytes == NBYTES // 8
    assert not known.through_hub


def test_a_trial_that_fails_is_not_repeated_soon() -> None:
    known = FasterRoute()
    rounds(lambda *_: 1.6, count=2, known=known)
    assert known.through_hub
    failed(known, relay=True, round_=2)
    assert not any(rounds(lambda *_: 1.6, count=LONGEST_PAUSE, known=known))


def test_a_failed_trial_of_the_direct_route_stays_with_the_hub() -> None:
    known = FasterRoute()
    rounds(lambda _, relay: 1.6 if relay else 2.4, count=3 + 50 + 1, known=known)
    assert known.trial
    assert not known.through_hub
    failed(known, relay=False, round_=54)
    assert all(rounds(lambda *_: 1.6, count=20, known=known))


def test_a_hub_that_fails_is_left() -> None:
    known = FasterRoute()
    rounds(lambda _, relay: 1.6 if relay else 2.4, count=10, known=known)
    failed(known, relay=True, round_=10)
    assert not any(rounds(lambda *_: 1.6, count=20, known=known))


# ------------------------------------------------------------------- with a machine of rounds


def routes(machine: RoundMachine, *, direct_s: float, relay_s: float, count: int) -> list[str]:
    now, found = 0.0, []
    for _ in range(count):
        round_ = machine.committed_round
        machine.join("w0", RoundJoin(round_, "b", ["w1"]), now)
        plan = plan_in(machine.join("w1", RoundJoin(round_, "b", ["w0"]), now))
        found.append(plan.route)
        now += relay_s if plan.route == "relay" else direct_s
        commit_all(machine, plan, now)
    return found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["direct"] * 2 + ["relay"] * 8),
        ({"preference": "direct"}, ["direct"] * 10),
        ({"preference": "relay"}, ["relay"] * 10),
        ({"collective": "tree"}, ["direct"] * 10),
        ({"reducer_ready": False}, ["direct"] * 10),
    ],
    ids=["auto", "direct", "relay", "a collective is named", "no reducer"],
)
def test_only_auto_may_choose(change: dict[str, object], expected: list[str]) -> None:
    machine = rounds_of(2, preference="auto")
    for name, value in change.items():
        setattr(machine, name, value)
    assert routes(machine, direct_s=2.4, relay_s=1.6, count=10) == expected


def test_a_change_is_said_once() -> None:
    machine, texts = rounds_of(2, preference="auto"), []
    for number in range(6):
        machine.join("w0", RoundJoin(number, "b", ["w1"]), 10.0 * number)
        plan = plan_in(machine.join("w1", RoundJoin(number, "b", ["w0"]), 10.0 * number))
        now = 10.0 * number + (1.6 if plan.route == "relay" else 2.4)
        machine.vote("w0", vote(plan), now)
        effects = machine.vote("w1", vote(plan), now)
        texts += [e.text for e in effects if isinstance(e, EventRaised) and e.kind == "route"]
    assert texts == ["rounds go through the hub: 1.6 s, directly 2.4 s"]


def test_without_a_reducer_rounds_go_on_directly() -> None:
    machine = rounds_of(2, preference="auto")
    assert routes(machine, direct_s=2.4, relay_s=1.6, count=6)[-1] == "relay"
    machine.reducer(100.0, ready=False)
    assert routes(machine, direct_s=2.4, relay_s=1.6, count=2) == ["direct", "direct"]
