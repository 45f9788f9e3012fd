"""What people see of a SWARM, from a ledger that was filled by requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.config import JobSpec, StrategyTable
from atoll.config.swarm_tables import SwarmTable
from atoll.hub.swarm.service import settings_of
from atoll.hub.swarm.view import PeerState, slowest_of, view_of_swarm
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


def ready(ledger: Ledger, member: str, stage: int, *, row_s: float = 0.0, dial: str = "") -> Holder:
    """Let a member recover the state of a stage."""
    at = [dial] if dial else []
    place = ledger.announce(member, SwarmAnnounce(stage=stage, dial=at, row_s=row_s), 0.0)
    body = SwarmAnnounce(place.epoch, stage, place.step)
    assert ledger.announce(member, body, 0.0).ready
    return Holder(member, place.epoch)


def through(ledger: Ledger, path: list[Holder], now: float, **more: object) -> None:
    """Take a microbatch over a path."""
    (lease,) = ledger.want(path[0].member, SwarmWant(path[0].epoch, 1), now).leases
    stages = list(range(len(path)))
    body = SwarmDone(lease.step, lease.index, lease.lease, stages, path, **more)  # type: ignore[arg-type]
    ledger.done(body, now)


def test_view_shows_members_their_shares_and_the_progress() -> None:
    ledger = Ledger(SwarmSettings(2, 8, rebalance_s=0))
    first = ready(ledger, "w0", 0, row_s=0.01, dial="10.0.0.1:7")
    fast, slow = ready(ledger, "w1", 1, row_s=0.02), ready(ledger, "w2", 1, row_s=0.06)
    failures = [SwarmFailure("w2", "no room", 2.0)]
    for number, other in enumerate([fast, slow, fast, fast]):
        through(ledger, [first, other], 10.0 + number, queues={"w1": 2.0})
    watch = SwarmWatch(first.epoch, 0, failures=failures, direct_bytes=30, relayed_bytes=10)
    ledger.recent.reported("w0", watch, 13.0)
    ledger.announce("w3", SwarmAnnounce(), 13.0)  # takes over the state of the slowest stage
    view = view_of_swarm(ledger, 14.0, nodes={"w0": "attic", "w1": "lap", "w2": "lap"})
    assert [stage.counted for stage in view.stages] == [4, 4]
    assert view.microbatches_per_s == pytest.approx(3 / 4)
    (own,), others = view.stages[0].peers, view.stages[1].peers
    assert (own.node, own.direct, own.share, own.state) == ("attic", 0.75, 1.0, PeerState.READY)
    assert (own.accepts, others[0].accepts, others[0].direct) == (True, False, None)
    assert [own.name, *(peer.name for peer in others)] == ["attic", "lap (w1)", "lap (w2)", "w3"]
    assert [stage.failed_in_a_row for stage in view.stages] == [0, 0]
    assert [(peer.member, peer.share, peer.queue, peer.state) for peer in others] == [
        ("w1", 0.75, 2.0, PeerState.READY),
        ("w2", 0.25, 0.0, PeerState.BANNED),
        ("w3", 0.0, 0.0, PeerState.RECOVERING),
    ]
    assert view.stages[1].rows_per_s == pytest.approx((1 / 0.02 + 1 / 0.06) / BOTH)
    assert [stage.slowest for stage in view.stages] == [False, True]
    later = view_of_swarm(ledger, 17.0, nodes={}).stages[1].peers[1]
    assert (later.state, later.failures, later.last_failure) == (PeerState.READY, 1, "no room")


def test_rate_of_microbatches_is_that_of_the_last_minute() -> None:
    ledger = Ledger(SwarmSettings(1, 4))
    only = ready(ledger, "w0", 0)
    for second in range(120):
        through(ledger, [only], float(second))
        for closed in ledger.counts:
            if closed.closing:
                ledger.agreed(0, ledger.step, ["w0"], float(second))
    assert ledger.recent.per_s(119.0) == pytest.approx(1.0)
    assert ledger.recent.per_s(149.0) == pytest.approx(0.5)
    assert ledger.recent.per_s(500.0) == 0.0


def test_pause_names_stage_and_memory_of_the_job_file() -> None:
    table = SwarmTable(stages=2, needs_gb=[1.0, 3.0])
    spec = JobSpec(swarm=table, strategy=StrategyTable(inner="swarm"))
    ledger = Ledger(settings_of(spec))
    ready(ledger, "w0", 0)
    view = view_of_swarm(ledger, 1.0, nodes={})
    assert view.paused == "no member serves stage 1: needs 3.0 GB of memory"
    assert list(view.empty) == [1]
    assert view.stages[1].needs_bytes == 3 * 10**9
    other = replace(spec, swarm=replace(table, stages=3))  # the file names those of two
    assert not settings_of(other).needs_bytes


def test_members_without_a_stage_are_named() -> None:
    ledger = Ledger(SwarmSettings(1, 4, needs_bytes=(100,)))
    ledger.announce("w1", SwarmAnnounce(free_bytes=50), 0.0)
    view = view_of_swarm(ledger, 0.0, nodes={"w0": "attic"}, whole=["w0"])
    assert (view.coming, view.whole) == (["w1"], ["attic"])


def test_move_tells_why_in_words() -> None:
    ledger = Ledger(SwarmSettings(2, 1, agrees=False, rebalance_s=1.0))
    members = [ready(ledger, f"w{n}", min(n, 1), row_s=1 / (BOTH * 12)) for n in range(4)]
    for now in (1.0, 3.0):
        through(ledger, members[:2], now)
    (move,) = ledger.moved
    assert move.reason == "stage 0 was the slowest: 12 -> 24 rows/s"
    ledger.moved.clear()
    ledger.lost("w0", 4.0)
    ledger.lost(move.member, 4.0)
    (move,) = ledger.moved
    assert move.reason == "stage 0 had no member"


@pytest.mark.parametrize(
    ("rates", "found"),
    [([3.0, 1.0], 1), ([1.0, 1.0], -1), ([None, 1.0], -1), ([1.0], -1), ([], -1)],
)
def test_slowest_stage_stands_out_or_is_not_named(rates: list[float | None], found: int) -> None:
    assert slowest_of(rates) == found


def test_ways_are_those_of_the_last_minute_and_of_this_process() -> None:
    recent = Ledger(SwarmSettings(1, 1)).recent

    def share(now: float, direct: int, relayed: int) -> float | None:
        recent.reported("w0", SwarmWatch(1, 0, direct_bytes=direct, relayed_bytes=relayed), now)
        return recent.direct("w0")

    assert recent.direct("w0") is None
    assert share(0.0, 0, 0) is None
    assert share(1.0, 0, 100) == 0.0
    assert share(30.0, 100, 100) == 0.5
    assert share(80.0, 400, 100) == 1.0  # the first hundred was longer ago
    assert share(81.0, 0, 50) == 0.0  # it was started again
