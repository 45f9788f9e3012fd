"""Loss alarms on trajectories: learning with noise is no news, standing still and climbing are."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.hub.alarms.facts import Mark
from atoll.hub.alarms.loss_rules import climb, flat_gain
from atoll.hub.alarms.series import MAX_POINTS, LossCurve
from tests.hub.alarms.stage import START, curve, facts, job, learning, play, rule
from tests.tiers import examples

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


@settings(max_examples=examples(60), deadline=None)
@given(
    rounds=st.integers(5, 600), noise=st.floats(0.0, 0.12), seed=st.integers(0, 10_000),
    every_s=st.floats(0.5, 120.0),
)  # fmt: skip
def test_noisy_learning_raises_no_alarm(
    rounds: int, noise: float, seed: int, every_s: float
) -> None:
    points = curve(learning(rounds, noise=noise, seed=seed), every_s=every_s)
    assert climb(points) is None
    assert flat_gain(points) is None


@pytest.mark.parametrize("name", ["alone", "average", "diloco", "diloco_warm", "every_step"])
def test_the_recorded_runs_are_nothing_to_tell_about(name: str) -> None:
    """Losses of ten steps on batches of four: as noisy as it gets."""
    losses = json.loads((GOLDEN / f"{name}.json").read_text())["losses"]
    points = curve(losses, every_s=120.0)
    assert climb(points) is None
    assert flat_gain(points) is None


@settings(max_examples=examples(40), deadline=None)
@given(noise=st.floats(0.0, 0.008), seed=st.integers(0, 10_000), level=st.floats(0.5, 11.0))
def test_run_that_learns_nothing_is_flat_once_certain(
    noise: float, seed: int, level: float
) -> None:
    words = random.Random(seed)
    points = curve([level * (1 + words.gauss(0.0, noise)) for _ in range(2_000)], every_s=5.0)
    gain = flat_gain(points)
    assert gain is not None
    assert abs(gain) < 0.005 * level


def test_flat_loss_alarm_ends_when_the_loss_falls() -> None:
    fell = [4.0 - 0.02 * n for n in range(100)]
    losses = [*fell, *[2.0] * 200, *[2.0 - 0.01 * n for n in range(100)]]

    def at(now: float) -> object:
        seen = int((now - START) / 10)
        return facts(job(curves={"": curve(losses[: max(1, seen)], every_s=10)}), now=now)

    played = play("loss-flat", at, seconds=4_000)  # type: ignore[arg-type]
    alarm = played.only()
    assert 1_000 + rule("loss-flat").holds_s < alarm.since + rule("loss-flat").holds_s - START
    assert "stopped improving at 2.000" in alarm.finding.cause
    assert "atoll resume j1 --set train.lr" in alarm.finding.remedy
    (ended,) = played.ended
    assert ended.ended is not None
    assert ended.ended > START + 3_000


@settings(max_examples=examples(30), deadline=None)
@given(noise=st.floats(0.0, 0.05), seed=st.integers(0, 10_000), rate=st.floats(0.03, 0.3))
def test_a_loss_that_explodes_is_found_whatever_the_noise(
    noise: float, seed: int, rate: float
) -> None:
    losses = learning(120, noise=noise, seed=seed)
    best = min(losses)
    losses += [best * (1 + rate) ** n for n in range(40)]
    found = climb(curve(losses))
    assert found is not None
    assert found[1] > found[0]


def test_climbing_loss_names_its_member_until_it_falls() -> None:
    bad = [2.0] * 60 + [2.0 + 0.2 * n for n in range(30)] + [2.0] * 120
    good = [2.0] * len(bad)

    def at(now: float) -> object:
        seen = max(1, int((now - START) / 4))
        both = [(a + b) / 2 for a, b in zip(bad, good, strict=True)]
        curves = {"": both, "w0": good, "w1": bad}
        shown = {m: curve(losses[:seen], every_s=4) for m, losses in curves.items()}
        return facts(job(members=("w0", "w1"), curves=shown), now=now)

    played = play("loss-diverging", at, seconds=4 * len(bad))  # type: ignore[arg-type]
    assert [a.finding.member for a in played.opened] == ["w1"]
    assert played.opened[0].finding.node == "lap1"
    assert played.opened[0].finding.severity == "critical"
    assert "most of all that of lap1" in played.opened[0].finding.cause
    assert len(played.ended) == 1


def test_one_bad_round_is_no_climb() -> None:
    losses = learning(60, noise=0.01, seed=1)
    assert climb(curve([*losses, 50.0])) is None
    assert climb(curve([*losses, 50.0, 50.0, *losses[-3:]])) is None


def test_members_that_train_alone_are_judged_one_by_one() -> None:
    flat = {m: curve([3.0] * 400, every_s=5) for m in ("", "w0")}
    flat["w1"] = curve(learning(400, noise=0.0, seed=1), every_s=5)
    alone = facts(job(members=("w0", "w1"), curves=flat, alone=True))
    (found,) = rule("loss-flat").find(alone)
    assert (found.member, found.node) == ("w0", "lap0")
    together = facts(job(members=("w0", "w1"), curves=flat))
    assert [f.member for f in rule("loss-flat").find(together)] == [""]


def test_first_non_finite_member_is_named() -> None:
    marks = [
        Mark(START, "w2", "loss is nan in round 7"),
        Mark(START + 4, "w0", "update_norm is nan in round 8"),
    ]

    def at(now: float) -> object:
        return facts(job(bad=[m for m in marks if m.time <= now]), now=now)

    played = play("loss-not-finite", at, seconds=300)  # type: ignore[arg-type]
    alarm = played.only()
    assert (alarm.finding.member, alarm.finding.node) == ("w2", "lap2")
    assert "loss is nan in round 7" in alarm.finding.cause
    assert len(played.ended) == 1
    assert played.ended[0].finding.cause.endswith("later w0 too")


def test_a_job_that_failed_of_it_is_told_for_a_day() -> None:
    marks = [Mark(START, "w1", "the loss is not finite (member w1, step 5)")]
    error = {"kind": "LossNotFinite", "what": "the loss is not finite"}
    ended = job(state="failed", error=error, bad=marks, ended=START)
    assert list(rule("loss-not-finite").find(facts(ended, now=START + 3_600)))
    assert not list(rule("loss-not-finite").find(facts(ended, now=START + 100_000)))
    assert not list(rule("loss-not-finite").find(facts(job())))


def test_curve_of_any_length_stays_bounded_and_keeps_its_mean() -> None:
    made = LossCurve()
    for number in range(100_000):
        made.add(float(number), float(number))
    assert MAX_POINTS // 2 - 1 <= len(made.points) < MAX_POINTS
    values = [loss for _, loss in made.points]
    assert values == sorted(values)
    gaps = {round(b - a, 6) for a, b in pairwise(values)}
    assert len(gaps) == 1


def test_failures_before_a_resume_are_not_blamed_again() -> None:
    marks = [Mark(START - 5_000, "w0", "loss is nan"), Mark(START, "w2", "loss is inf")]
    (found,) = rule("loss-not-finite").find(facts(job(bad=marks)))
    assert found.member == "w2"
    assert "w0" not in found.cause
