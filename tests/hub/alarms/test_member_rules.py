"""Alarms about single members: each with a cause that names the machine, and an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.hub.alarms.facts import Facts, Mark, MemberFacts
from atoll.hub.alarms.member_rules import slowest
from atoll.hub.rounds.timeline import CatchUp
from tests.hub.alarms.stage import START, facts, job, passed, play, row, rule
from tests.tiers import examples

MEMBERS = ("w0", "w1", "w2")
PERIOD_S = 10.0


def run_of(make: Callable[[int], CatchUp], rounds: int, **changes: Any) -> Callable[[float], Facts]:
    """Return the facts of a job that commits a round every ten seconds."""
    made = [make(number) for number in range(rounds)]

    def at(now: float) -> Facts:
        seen = [one for one in made if one.time <= now][-40:]
        return facts(job(seen, **changes), now=now)

    return at


def rounds_of(part: Callable[[int, str], dict[str, Any]], **more: Any) -> Callable[[int], CatchUp]:
    """Return what makes the n-th round: every member's part differs from ordinary by `part`."""

    def make(number: int) -> CatchUp:
        rows = [row(m, **part(number, m)) for m in MEMBERS]
        return passed(number, rows, time=START + number * PERIOD_S, **more)

    return make


def between(number: int) -> bool:
    return 10 <= number < 20


KINDS = ["zero-contribution", "update-outlier", "straggler", "stale", "replica-mismatch"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.25))
def test_an_ordinary_run_with_noise_is_nothing_to_tell_about(
    kind: str, seed: int, noise: float
) -> None:
    words = random.Random(seed)

    def part(number: int, member: str) -> dict[str, Any]:
        own = 1 + words.gauss(0.0, noise) if noise else 1.0
        compute_s = 8.0 * (1 + abs(words.gauss(0.0, min(noise, 0.08))))
        return {"update_norm": max(0.3, own) * 2.0**-number, "compute_s": compute_s}

    def make(number: int) -> CatchUp:
        parts = {m: part(number, m) for m in MEMBERS}
        last_s = max(p["compute_s"] for p in parts.values())
        rows = [row(m, wait_s=last_s - p["compute_s"], **p) for m, p in parts.items()]
        return passed(number, rows, time=START + number * PERIOD_S)

    assert not play(kind, run_of(make, 40), seconds=400).opened


# ------------------------------------------------------------------------- zero contribution


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"update_norm": 0.0}, "its updates were all zero"),
        ({"steps": 0}, "it did no step in the last 3 rounds, so its weight is 0"),
    ],
)
def test_silent_zero_contribution_is_found_named_and_ends(part: dict[str, Any], words: str) -> None:
    make = rounds_of(lambda n, m: part if m == "w1" and between(n) else {})
    played = play("zero-contribution", run_of(make, 40), seconds=400)
    alarm = played.only()
    assert (alarm.finding.member, alarm.finding.node) == ("w1", "lap1")
    assert words in alarm.finding.cause
    assert "atoll logs j1 --member w1" in alarm.finding.remedy
    assert alarm.since == pytest.approx(START + 12 * PERIOD_S, abs=3)
    assert len(played.ended) == 1
    assert played.ended[0].ended == pytest.approx(START + 200 + 30, abs=6)


def test_member_excluded_from_every_commit_is_found() -> None:
    def make(number: int) -> CatchUp:
        out = MEMBERS if not between(number) else ("w0", "w2")
        rows = [row(m) for m in MEMBERS]
        return passed(number, rows, time=START + number * PERIOD_S, contributors=out)

    played = play("zero-contribution", run_of(make, 40), seconds=400)
    assert "its contributions were left out of the last 3 commits" in played.only().finding.cause
    assert len(played.ended) == 1


def test_missing_norms_are_not_zero_contributions() -> None:
    silent = rounds_of(lambda n, m: {"update_norm": None})
    assert not play("zero-contribution", run_of(silent, 20), seconds=200).opened
    short = rounds_of(lambda n, m: {"update_norm": 0.0} if m == "w1" and n in (5, 6) else {})
    assert not play("zero-contribution", run_of(short, 20), seconds=200).opened
    together = rounds_of(lambda n, m: {"steps": 0, "update_norm": None})
    assert not play("zero-contribution", run_of(together, 20), seconds=200).opened, "a warm-up"


def test_member_that_has_gone_is_not_blamed_any_more() -> None:
    make = rounds_of(lambda n, m: {"update_norm": 0.0} if m == "w1" else {})
    gone = run_of(make, 40, states={"w1": "lost"})
    assert not play("zero-contribution", gone, seconds=200).opened


# --------------------------------------------------------------------------- update outliers


@pytest.mark.parametrize("times", [8.0, 1 / 8])
def test_update_of_quite_another_size_is_found_and_ends(times: float) -> None:
    words = random.Random(3)

    def part(number: int, member: str) -> dict[str, Any]:
        norm = 1.0 + 0.1 * words.random()
        return {"update_norm": norm * times if member == "w2" and between(number) else norm}

    played = play("update-outlier", run_of(rounds_of(part), 40), seconds=400)
    assert (played.only().finding.member, played.only().finding.node) == ("w2", "lap2")
    assert len(played.ended) == 1


def test_of_two_members_each_is_compared_with_its_own_past() -> None:
    def make(number: int) -> CatchUp:
        own = 9.0 if between(number) else 1.0
        rows = [row("w0", update_norm=1.1), row("w1", update_norm=own)]
        return passed(number, rows, time=START + number * PERIOD_S)

    played = play("update-outlier", run_of(make, 40, members=("w0", "w1")), seconds=400)
    assert played.opened[0].finding.member == "w1"
    assert all(a.finding.member == "w1" for a in played.opened)
    assert len(played.ended) == len(played.opened)


def test_joint_or_single_norm_changes_are_no_outlier() -> None:
    falling = rounds_of(lambda n, m: {"update_norm": 10.0 * 0.5**n})
    assert not play("update-outlier", run_of(falling, 40), seconds=400).opened
    once = rounds_of(lambda n, m: {"update_norm": 50.0} if (n, m) == (12, "w1") else {})
    assert not play("update-outlier", run_of(once, 40), seconds=400).opened
    paced = rounds_of(lambda n, m: {"update_norm": 0.4, "steps": 3} if m == "w1" else {})
    assert not play("update-outlier", run_of(paced, 40), seconds=400).opened


# ------------------------------------------------------------------------------- stragglers


def slow(number: int, member: str) -> dict[str, Any]:
    """w1 needs 20 s where the others need 8 s."""
    late = between(number)
    if member == "w1":
        return {"compute_s": 20.0 if late else 8.0, "wait_s": 0.0}
    return {"wait_s": 12.0 if late else 0.3}


def test_straggler_is_found_with_its_cost_until_it_ends() -> None:
    played = play("straggler", run_of(rounds_of(slow), 40), seconds=400)
    finding = played.only().finding
    assert (finding.member, finding.node) == ("w1", "lap1")
    assert finding.value is not None
    assert 0.2 < finding.value < 0.5
    assert "lap1 slows the others down: they wait" in finding.cause
    assert "atoll drain lap1" in finding.remedy
    assert len(played.ended) == 1


def test_straggler_costs_the_time_others_wait_for_it() -> None:
    member, lost, wait_s, period_s = (
        slowest([rounds_of(slow)(n) for n in range(10, 20)]) or ("",) * 4
    )
    assert (member, wait_s) == ("w1", 12.0)
    assert period_s == pytest.approx(21.2)
    assert lost == pytest.approx(2 / 3 * 12.0 / 21.2)


def test_members_that_alternate_last_are_no_stragglers() -> None:
    def part(number: int, member: str) -> dict[str, Any]:
        late = MEMBERS[number % 3] == member
        return {"compute_s": 20.0, "wait_s": 0.0} if late else {"wait_s": 12.0}

    assert not play("straggler", run_of(rounds_of(part), 40), seconds=400).opened


def test_rounds_without_times_of_all_say_nothing_of_stragglers() -> None:
    make = rounds_of(lambda n, m: slow(12, m) | ({"wait_s": None} if m == "w0" else {}))
    assert slowest([make(n) for n in range(10)]) is None


def test_stuck_round_alarm_opens_at_once_and_ends() -> None:
    make = rounds_of(lambda n, m: {})

    def at(now: float) -> Facts:
        seen = [make(n) for n in range(10)]
        waited = now - START - 100
        stuck = 0 < waited < 80
        return facts(
            job(seen, waits_for=["w2"] if stuck else [], waits_s=max(0.0, waited)), now=now
        )

    played = play("straggler", at, seconds=400)
    assert (played.only().finding.member, played.only().finding.severity) == ("w2", "critical")
    assert "waited" in played.only().finding.cause
    assert len(played.ended) == 1


# ------------------------------------------------------------------------------------ stale


def test_missed_commits_alarm_ends_when_member_is_back() -> None:
    def make(number: int) -> CatchUp:
        present = [m for m in MEMBERS if m != "w1" or not between(number)]
        return passed(number, [row(m) for m in present], time=START + number * PERIOD_S)

    played = play("stale", run_of(make, 40), seconds=400)
    finding = played.only().finding
    assert (finding.member, finding.node) == ("w1", "lap1")
    assert "its last was round 9" in finding.cause
    assert len(played.ended) == 1
    assert played.ended[0].ended == pytest.approx(START + 200 + 15, abs=6)


def test_member_that_has_just_come_is_not_stale() -> None:
    rounds = [passed(n, [row("w0"), row("w2")], time=START + n) for n in range(20)]
    known = dict(job().members)
    known["w1"] = MemberFacts(member="w1", node="lap1", state="running", since=START + 18)
    assert not list(rule("stale").find(facts(job(rounds, members=known), now=START + 20)))


# ------------------------------------------------------------------------- replica mismatch


def test_replica_that_differs_is_found_and_ends() -> None:
    mark = Mark(START + 20, "w2", "w2 differs from the other replicas at round 4")

    def at(now: float) -> Facts:
        return facts(job(differs=[mark] if now >= mark.time else []), now=now)

    played = play("replica-mismatch", at, seconds=400)
    finding = played.only().finding
    assert (finding.node, finding.severity) == ("lap2", "critical")
    assert "lap2 differs" in finding.cause
    assert played.ended[0].ended == pytest.approx(START + 20 + 120 + 60, abs=6)


def test_final_parameter_mismatch_is_found() -> None:
    def end(digests: dict[str, tuple[str, int]], **more: Any) -> list[str]:
        known = {
            m: MemberFacts(member=m, node="n", state="done", end={"digest": d, "rounds": r})
            for m, (d, r) in digests.items()
        }
        ended = job(state="done", ended=START - 5, members=known, **more)
        return [f.member for f in rule("replica-mismatch").find(facts(ended))]

    assert end({"w0": ("a", 9), "w1": ("a", 9), "w2": ("b", 9)}) == ["w2"]
    assert end({"w0": ("a", 9), "w1": ("a", 9), "w2": ("b", 4)}) == []
    assert end({"w0": ("a", 9), "w1": ("", 9)}) == []
    assert end({"w0": ("a", 9), "w1": ("b", 9)}, alone=True) == []


@pytest.mark.parametrize("lie", [{"stage": "x"}, {"digest": ["a"]}, {"modules": 3}])
def test_an_absurd_result_hides_no_mismatch_of_another_job(lie: dict[str, Any]) -> None:
    def ended(name: str, ends: list[dict[str, Any]]) -> Any:
        known = {
            f"w{n}": MemberFacts(member=f"w{n}", node="n", state="done", end=end)
            for n, end in enumerate(ends)
        }
        return job(job=name, state="done", ended=START - 5, members=known)

    same = {"digest": "a", "rounds": 9}
    of_liar = ended("lies", [{**same, **lie}, same, same])
    honest = ended("honest", [same, same, {**same, "digest": "b"}])
    found = rule("replica-mismatch").find(facts(of_liar, honest))
    assert [(f.job, f.member) for f in found] == [("honest", "w2")]
