"""Alarms open when a condition lasts, live on in new words, and end when it is gone for good."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.hub.alarms.engine import UPDATE_S, Alarm, Engine, Finding, Rule
from atoll.hub.alarms.watch import KINDS, RULES

HOLDS_S, GONE_S = 10.0, 20.0
KIND = "straggler"
RULE = Rule(kind=KIND, find=lambda facts: (), holds_s=HOLDS_S, gone_s=GONE_S)


def found(member: str = "w0", **changes: Any) -> Finding:
    return Finding(**({"kind": KIND, "cause": "c", "remedy": "r", "member": member} | changes))


@given(st.lists(st.booleans(), max_size=200))
def test_alarms_open_and_end_exactly_at_their_times(present: list[bool]) -> None:
    """Against a plain model: runs of looks in which the condition held, or did not."""
    engine, opened, ended = Engine([RULE]), [], []
    since: float | None = None
    last = 0.0
    is_open = False
    for number, there in enumerate(present):
        now = number * 2.0
        changes = engine.look([found()] if there else [], {KIND}, now)
        opened += [now] * len(changes.opened)
        ended += [now] * len(changes.ended)
        if there:
            since = now if since is None else since
            last = now
            if not is_open and now - since >= HOLDS_S:
                is_open = True
                assert opened[-1] == now
        elif is_open and now - last >= GONE_S:
            is_open, since = False, None
            assert ended[-1] == now
        elif not is_open:
            since = None
        assert bool(engine.open) == is_open
    assert len(opened) - len(ended) == int(is_open)


def test_kinds_that_were_not_looked_for_stay_as_they_are() -> None:
    engine = Engine([RULE])
    for now in (0.0, HOLDS_S):
        engine.look([found()], {KIND}, now)
    assert not engine.look([], set(), 1_000.0)
    assert len(engine.open) == 1
    assert engine.look([], {KIND}, 1_000.0).ended


def test_findings_about_different_members_are_different_alarms() -> None:
    engine = Engine([RULE])
    engine.look([found("w0")], {KIND}, 0.0)
    changes = engine.look([found("w0"), found("w1")], {KIND}, HOLDS_S)
    assert [a.finding.member for a in changes.opened] == ["w0"]


def test_words_are_renewed_now_and_then_and_severity_at_once() -> None:
    engine = Engine([RULE])
    engine.look([found()], {KIND}, 0.0)
    engine.look([found()], {KIND}, HOLDS_S)
    assert not engine.look([found(cause="worse")], {KIND}, HOLDS_S + 2)
    assert next(iter(engine.open.values())).finding.cause == "worse"
    (updated,) = engine.look([found(severity="critical")], {KIND}, HOLDS_S + 4).updated
    assert updated.finding.severity == "critical"
    later = HOLDS_S + 4 + UPDATE_S
    assert engine.look([found(severity="critical", cause="new")], {KIND}, later).updated
    assert not engine.look([found(severity="critical", cause="new")], {KIND}, later + UPDATE_S)


def test_alarm_of_an_earlier_life_of_the_hub_is_the_same_alarm() -> None:
    engine = Engine([RULE])
    engine.restore([Alarm(7, found(), 5.0, 6.0)], now=100.0)
    assert not engine.look([found()], {KIND}, 101.0).opened
    (ended,) = engine.look([], {KIND}, 101.0 + GONE_S).ended
    assert (ended.id, ended.since) == (7, 5.0)


def test_restored_alarm_that_is_not_seen_again_ends() -> None:
    engine = Engine([RULE])
    engine.restore([Alarm(7, found(), 5.0, 6.0)], now=100.0)
    assert not engine.look([], {KIND}, 100.0 + GONE_S - 1)
    assert engine.look([], {KIND}, 100.0 + GONE_S).ended


def test_every_kind_of_the_contract_has_one_rule() -> None:
    assert set(KINDS) == {
        "zero-contribution", "loss-flat", "loss-diverging", "loss-not-finite", "update-outlier",
        "replica-mismatch", "straggler", "stale", "flapping-link", "disk-filling",
        "memory-filling", "clock-skew", "version-mismatch", "node-lost", "job-failed",
        "queue-full", "stage-slow", "stage-alone", "swarm-paused", "stage-fails",
        "member-banned", "limit-reached",
    }  # fmt: skip
    assert len(RULES) == len(KINDS) == 22


def test_changes_that_were_not_stored_are_found_again() -> None:
    engine = Engine([RULE])
    engine.look([found()], {KIND}, 0.0)
    engine.undo(engine.look([found()], {KIND}, HOLDS_S))
    assert not engine.open
    (opened,) = engine.look([found()], {KIND}, HOLDS_S + 2).opened
    assert opened.since == 0.0
    worse = found(severity="critical")
    engine.undo(engine.look([worse], {KIND}, HOLDS_S + 4))
    (updated,) = engine.look([worse], {KIND}, HOLDS_S + 6).updated
    assert updated.finding == worse
    gone = HOLDS_S + 6 + GONE_S
    engine.undo(engine.look([], {KIND}, gone))
    (ended,) = engine.look([], {KIND}, gone + 2).ended
    assert ended.ended == gone + 2


def test_new_words_that_came_too_soon_are_stored_later() -> None:
    engine = Engine([RULE])
    engine.look([found()], {KIND}, 0.0)
    engine.look([found()], {KIND}, HOLDS_S)
    assert not engine.look([found(cause="worse")], {KIND}, HOLDS_S + 2)
    (updated,) = engine.look([found(cause="worse")], {KIND}, HOLDS_S + UPDATE_S).updated
    assert updated.finding.cause == "worse"
