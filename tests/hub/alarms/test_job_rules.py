"""Alarms about whole jobs and about queues."""

from __future__ import annotations

from dataclasses import replace

from atoll.hub.alarms.facts import Facts, HubFacts, LimitedFacts, MemberFacts, QueueFacts
from tests.hub.alarms.stage import START, facts, job, play, rule


def test_failed_job_alarm_shows_error_and_ends_on_resume() -> None:
    error = {"kind": "DataError", "what": "the text is missing", "given": "x.txt",
             "remedy": "copy it there"}  # fmt: skip
    lost = MemberFacts(member="w1", node="lap1", state="failed", error=error)
    failed = job(state="failed", error=error, ended=START, members={"w1": lost})

    def at(now: float) -> Facts:
        return facts(failed if 20 <= now - START < 200 else job(), now=now)

    played = play("job-failed", at, seconds=300)
    finding = played.only().finding
    assert finding.cause == "j1 failed: the text is missing (x.txt), on lap1"
    assert finding.remedy.startswith("copy it there; once that is mended: atoll resume")
    assert (finding.node, finding.severity) == ("lap1", "critical")
    assert len(played.ended) == 1


def test_finished_or_old_failed_job_raises_no_alarm() -> None:
    long_ago = job(state="failed", ended=START - 90_000)
    assert not list(rule("job-failed").find(facts(job(state="done", ended=START), long_ago)))


def test_who_sends_more_than_one_may_is_named() -> None:
    member = MemberFacts(member="w1", node="lap1", state="running")

    def at(now: float) -> Facts:
        limited = [
            LimitedFacts(address=address, frames=90_000, paused_s=12.0)
            for address in ("j1/w1", "box")
            if 20 <= now - START < 200
        ]
        running = facts(job(members={"w1": member}), now=now)
        return replace(running, hub=HubFacts(limited=limited))

    played = play("limit-reached", at, seconds=400)
    found = {alarm.finding.key: alarm.finding for alarm in played.opened}
    assert (found["j1/w1"].member, found["j1/w1"].node) == ("w1", "lap1")
    assert "90,000 so far, made to wait 12 s" in found["j1/w1"].cause
    assert (found["box"].job, found["box"].node) == ("", "box")
    assert len(played.ended) == 2


def test_queue_that_is_full_or_has_dead_letters_is_told_and_ends() -> None:
    def at(now: float) -> Facts:
        wrong = 20 <= now - START < 200
        queue = QueueFacts(
            queue="experience", ready=100, dead=2 if wrong else 0, fill=1.0 if wrong else 0.5,
            waiting=3 if wrong else 0,
        )  # fmt: skip
        return Facts(now=now, hub=HubFacts(queues=[queue, QueueFacts(queue="calm")]))

    played = play("queue-full", at, seconds=400)
    causes = sorted(a.finding.cause for a in played.opened)
    assert causes[0].startswith("queue experience has 2 dead letters")
    assert causes[1] == ("queue experience is full: 100 items, 100% of its bound, 3 producers wait")
    assert len(played.ended) == 2
