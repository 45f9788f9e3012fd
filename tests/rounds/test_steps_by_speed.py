"""Steps in proportion to measured speed, and how patient the hub is by what it measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.rounds.commit import (
    DEAD_BAND,
    GRAIN,
    SLOWEST,
    assign_steps,
    base_step_s,
    learn_steps,
    newcomer_pace,
    share_of,
    too_slow,
)
from atoll.rounds.timing import (
    RoundTimings,
    broken_s,
    grace_s,
    hiding_steps,
    hold_s,
    learn_round,
    learn_spread,
    mean,
    timeout_s,
)
from atoll.wire.messages import MemberStats, RoundJoin
from tests.rounds.rounds_by_hand import commit_all, plan_in, rounds_of


@given(st.floats(0.001, 100), st.floats(0.001, 100))
def test_share_is_between_a_quarter_and_one_in_steps_of_a_grain(own: float, fast: float) -> None:
    share = share_of(own, min(own, fast))
    assert SLOWEST <= share <= 1.0
    assert (share * GRAIN).is_integer()


@given(st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), st.floats(0.01, 10), min_size=1))
def test_the_fastest_does_all_its_steps(step_s: dict[str, float]) -> None:
    fastest = min(step_s, key=lambda member: step_s[member])
    assert fastest not in assign_steps(step_s, step_s)


def test_half_as_fast_does_half_and_noise_changes_nothing() -> None:
    assert assign_steps({"w0": 1.0, "w1": 2.0, "w2": 1.0}, ["w0", "w1", "w2"]) == {"w1": 0.5}
    # w2 is as fast as w0 but for noise, and does all steps: w1 has as long as w2 needs for them.
    assert assign_steps({"w0": 1.0, "w1": 2.0, "w2": 1.1}, ["w0", "w1", "w2"]) == {"w1": 141 / 256}
    assert base_step_s([1.0, 1.0 / (1.0 - DEAD_BAND), 2.0]) == 1.0 / (1.0 - DEAD_BAND)
    assert assign_steps({"w0": 1.0, "w1": 2.0}, ["w1"]) == {}


def test_speed_is_learned_from_what_members_tell() -> None:
    measures = RoundTimings()
    learn_steps(measures, {"w0": RoundJoin(0, "b", steps=10, busy_s=5.0), "w1": RoundJoin(0, "b")})
    learn_steps(measures, {"w0": RoundJoin(1, "b", steps=10, busy_s=10.0)})
    assert measures.step_s == {"w0": pytest.approx(0.75)}
    assert (measures.reports, measures.busy_s) == ({"w0": 2}, {"w0": 15.0})


def test_too_slow_is_said_only_of_what_is_known_well() -> None:
    measures = RoundTimings(step_s={"w0": 1.0, "w1": 4.5}, reports={"w0": 5, "w1": 5})
    assert too_slow(measures, ["w0", "w1"]) == {}
    measures.busy_s = {"w0": 5.0, "w1": 22.5}
    assert too_slow(measures, ["w0", "w1"]) == {"w1": 4.5}
    measures.reports["w1"] = 4
    assert too_slow(measures, ["w0", "w1"]) == {}


@given(st.floats(0.25, 1.0), st.floats(0.1, 100), st.floats(0, 200))
def test_newcomer_does_its_share_of_what_is_left(
    share: float, period_s: float, elapsed_s: float
) -> None:
    pace = newcomer_pace(share, period_s=period_s, elapsed_s=elapsed_s)
    left = 1 - elapsed_s / period_s
    assert pace == (pytest.approx(share * left) if left >= 0.1 else 0.0)


def test_newcomer_holds_up_nobody_when_no_period_was_measured() -> None:
    assert newcomer_pace(1.0, period_s=None, elapsed_s=0.0) == 0.0


def test_patience_follows_what_was_measured() -> None:
    measures = RoundTimings()
    assert grace_s(measures, first_s=120.0) == 120.0
    assert (hold_s(measures), broken_s(measures), timeout_s(measures, "relay")) == (10, 0.5, 120)
    measures = RoundTimings(spread_s=1.0, period_s=20.0, duration_s={"direct": 2.0})
    assert grace_s(measures, first_s=120.0) == 2 + 3 + 5
    assert (hold_s(measures), broken_s(measures)) == (20.0, 2.0)
    assert timeout_s(measures, "direct", patience=2.0) == 2 * (5 + 8)
    assert timeout_s(measures, "relay") == 120.0
    measures.period_s = 1000.0
    assert grace_s(measures, first_s=120.0) == 2 + 3 + 30
    assert (hold_s(measures), broken_s(measures)) == (60.0, 5.0)


def test_a_long_wait_is_no_spread() -> None:
    measures = RoundTimings(spread_s=1.0, period_s=10.0)
    learn_spread(measures, 3600.0)
    assert measures.spread_s == mean(1.0, 20.0)


def test_a_guest_does_more_or_fewer_steps_than_the_others() -> None:
    step_s = {"w0": 0.5, "w1": 1.0, "w2": 0.9}
    assert assign_steps(step_s, step_s, guests={"w0"}) == {"w0": 2.0}
    assert assign_steps(step_s | {"w0": 2.0}, step_s, guests={"w0"}) == {"w0": 0.5}
    assert assign_steps(step_s | {"w0": 0.01}, step_s, guests={"w0"}) == {"w0": 4.0}
    assert assign_steps(step_s | {"w0": 1.1}, step_s, guests={"w0"}) == {}
    assert assign_steps({"w0": 1.0}, ["w0", "w1"], guests={"w0"}) == {}


# ------------------------------------------------------------- steps that hide a round


def test_delay_hides_the_usual_round_and_its_deviation() -> None:
    measures = RoundTimings()
    assert hiding_steps(measures, step_s=0.125) == 0, "nothing was measured"
    learn_round(measures, 0.4)
    assert hiding_steps(measures, step_s=0.125) == 5, "0.4 s, and half of it for safety"
    assert hiding_steps(measures, step_s=0.0) == 0
    for _ in range(40):
        learn_round(measures, 0.4)
    assert hiding_steps(measures, step_s=0.125) == 4
    assert hiding_steps(measures, step_s=10.0) == 1


def test_delay_follows_a_link_that_slows_down_and_recovers() -> None:
    measures = RoundTimings()
    learn_round(measures, 1.0)
    fast = hiding_steps(measures, step_s=1.0)
    for _ in range(3):
        learn_round(measures, 8.0)
    slow = hiding_steps(measures, step_s=1.0)
    for _ in range(40):
        learn_round(measures, 1.0)
    assert fast < 8 <= slow
    assert hiding_steps(measures, step_s=1.0) <= fast


def test_verdict_carries_the_same_delay_for_all_members() -> None:
    """Steps of 0.5 s; a round of 2 s from the plan to the verdict, and 0.5 s to be planned."""
    machine, now, effects = rounds_of(2), 0.0, []
    stats = {"w0": MemberStats(phases={"wait": 9.0}), "w1": MemberStats(phases={"wait": 0.5})}
    for round_ in range(30):
        for member in ("w0", "w1"):
            join = RoundJoin(round_, "b", steps=4, busy_s=2.0, stats=stats[member])
            effects = machine.join(member, join, now)
        verdict = commit_all(machine, plan_in(effects), now + 2.0)
        now += 10.0
    assert verdict.delay == 6, "2.5 s; w0 also waited for w1, which no delay hides"
