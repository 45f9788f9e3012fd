"""Alarms about the stages of a SWARM name stage and machine, and say what would help."""

from __future__ import annotations

from atoll.hub.alarms.facts import Facts
from atoll.hub.swarm.view import view_of_swarm
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.swarm.routing import BOTH
from atoll.wire.swarm import (
    Holder,
    SwarmAnnounce,
    SwarmDone,
    SwarmFailure,
    SwarmWant,
    SwarmWatch,
)
from tests.hub.alarms.stage import Played, facts, job, play


def ledger_with(*stages: list[float], needs_bytes: tuple[int, ...] = ()) -> Ledger:
    """Return a ledger whose stages have members with these rows per second."""
    ledger = Ledger(SwarmSettings(len(stages), 4, needs_bytes=needs_bytes))
    for stage, rates in enumerate(stages):
        for number, rate in enumerate(rates):
            add(ledger, f"w{stage}{number}", stage, rate)
    return ledger


def add(ledger: Ledger, member: str, stage: int, rate: float) -> None:
    row_s = 1 / (BOTH * rate)
    place = ledger.announce(member, SwarmAnnounce(stage=stage, row_s=row_s), 0.0)
    body = SwarmAnnounce(place.epoch, stage, place.step, row_s=row_s)
    assert ledger.announce(member, body, 0.0).ready


def played(kind: str, ledger: Ledger, *, now: float = 0.0, waits_s: float = 0.0) -> Played:
    """Show the same for five minutes."""
    nodes = {name: f"lap{name[1:]}" for name in ledger.members}

    def at(time: float) -> Facts:
        view = view_of_swarm(ledger, now, nodes=nodes, waits_s=waits_s)
        return facts(job(swarm=view), now=time)

    return play(kind, at, seconds=300.0)


def test_slow_stage_is_named_with_what_one_more_brings() -> None:
    slow = ledger_with([44.0], [30.0, 30.0], [10.0, 21.0])
    found = played("stage-slow", slow).only().finding
    assert found.cause == (
        "stage 2 holds all up: 2 machines (lap20, lap21) at 31 rows/s, the next slowest stage does "
        "44; one more like these would bring 44"
    )
    assert (found.member, found.node, found.key) == ("w20", "lap20", "2")


def test_stages_of_similar_speed_are_no_alarm() -> None:
    assert not played("stage-slow", ledger_with([44.0], [40.0])).opened
    assert not played("stage-slow", ledger_with([44.0], [])).opened


def test_stage_whose_speed_is_unknown_is_no_alarm() -> None:
    ledger = ledger_with([44.0], [4.0])
    ledger.members["w00"].row_s = 0.0
    assert not played("stage-slow", ledger).opened


def test_a_single_stage_waits_for_no_other() -> None:
    assert not played("stage-slow", ledger_with([40.0, 10.0])).opened


def test_stages_with_one_member_have_no_spare() -> None:
    found = played("stage-alone", ledger_with([4.0, 4.0], [4.0], [4.0])).only().finding
    assert "stages 1 (lap10), 2 (lap20) have a single member each" in found.cause
    assert "a member of another stage takes its place" in found.cause
    assert "join 2 more machines" in found.remedy
    found = played("stage-alone", ledger_with([4.0], [4.0])).only().finding
    assert "the job waits for another machine" in found.cause
    assert not played("stage-alone", ledger_with([4.0, 4.0], [4.0, 4.0])).opened


def test_paused_swarm_says_which_stage_needs_how_much() -> None:
    ledger = ledger_with([4.0], [], needs_bytes=(10**9, 3_100_000_000))
    found = played("swarm-paused", ledger).only().finding
    assert found.cause == "j1 waits: no member serves stage 1: needs 3.1 GB of memory"
    assert "with at least 3.1 GB of free memory" in found.remedy
    assert found.severity == "critical"
    assert not played("stage-alone", ledger).opened  # one alarm is enough


def test_member_that_takes_over_a_state_has_a_minute() -> None:
    ledger = ledger_with([4.0], [])
    ledger.announce("w9", SwarmAnnounce(), 0.0)
    assert not played("swarm-paused", ledger).opened
    found = played("swarm-paused", ledger, waits_s=61.0).only().finding
    assert found.cause == "j1 waits: stage 1 waits for its state, which lap9 recovers"
    assert "atoll logs j1 --member w9" in found.remedy


def test_pause_ends_with_a_member_of_the_stage() -> None:
    ledger = ledger_with([4.0], [])

    def at(time: float) -> Facts:
        if len(ledger.members) == 1 and time > 1_000_020:
            add(ledger, "w1", 1, 4.0)
        return facts(job(swarm=view_of_swarm(ledger, 0.0, nodes={})), now=time)

    alarms = play("swarm-paused", at, seconds=40)
    assert (len(alarms.opened), len(alarms.ended)) == (1, 1)


def fail(ledger: Ledger, *, now: float) -> None:
    """Let a microbatch come through after w10 failed at it."""
    driver = ledger.members["w00"].holder
    (lease,) = ledger.want("w00", SwarmWant(driver.epoch, 1), now).leases
    holders: list[Holder] = [driver, ledger.members["w11"].holder]
    failures = [SwarmFailure("w10", "the member is not connected", 2.0)]
    ledger.recent.reported("w00", SwarmWatch(driver.epoch, 0, failures=failures), now)
    body = SwarmDone(0, lease.index, lease.lease, [0, 1], holders)
    ledger.done(body, now)
    ledger.done(body, now)  # its answer was lost: it counts once


def test_member_that_fails_again_and_again_is_named() -> None:
    ledger = ledger_with([4.0], [4.0, 4.0])
    for number in range(2):
        fail(ledger, now=100.0 * number)
    assert not played("member-banned", ledger, now=201.0).opened
    fail(ledger, now=200.0)
    found = played("member-banned", ledger, now=201.0).only().finding
    assert found.cause == (
        "lap10 failed 3 times in ten minutes in stage 1 and was banned each time "
        "(banned now): the member is not connected"
    )
    assert not played("member-banned", ledger, now=1_000.0).opened


def test_stage_whose_only_member_fails_is_named_with_the_reason() -> None:
    ledger = ledger_with([4.0], [4.0])
    driver = ledger.members["w00"].holder
    failure = SwarmFailure("w10", "CUDA error: an illegal memory access", 2.0)
    for number in range(2):
        watch = SwarmWatch(driver.epoch, 0, failures=[failure])
        ledger.recent.reported("w00", watch, 10.0 * number)
    assert not played("stage-fails", ledger, now=20.0).opened
    ledger.recent.reported("w00", SwarmWatch(driver.epoch, 0, failures=[failure]), 20.0)
    found = played("stage-fails", ledger, now=21.0).only().finding
    assert found.cause == (
        "no microbatch comes through stage 1: lap10, its only member, failed 3 times since "
        "the last one: CUDA error: an illegal memory access"
    )
    assert "atoll logs j1 --member w10" in found.remedy
    assert "atoll drain lap10" in found.remedy
    assert found.severity == "critical"
    (lease,) = ledger.want("w00", SwarmWant(driver.epoch, 1), 22.0).leases
    holders = [driver, ledger.members["w10"].holder]
    ledger.done(SwarmDone(0, lease.index, lease.lease, [0, 1], holders), 23.0)
    assert not played("stage-fails", ledger, now=24.0).opened  # one has come through


def test_stage_with_a_member_that_works_does_not_fail() -> None:
    ledger = ledger_with([4.0], [4.0, 4.0])
    driver = ledger.members["w00"].holder
    failures = [SwarmFailure("w10", "broken", 2.0)] * 3
    ledger.recent.reported("w00", SwarmWatch(driver.epoch, 0, failures=failures), 1.0)
    assert not played("stage-fails", ledger, now=2.0).opened
    assert played("member-banned", ledger, now=2.0).opened
