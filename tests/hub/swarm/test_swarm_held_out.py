"""A real hub stores what a SWARM measured once, and scores the checkpoint of that state."""

from __future__ import annotations

import asyncio
import math

import pytest

from atoll.hub.server import HubServer
from atoll.swarm.evaluations import Evaluated
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder, decode_manifest
from atoll.wire.messages import Done, SwarmAnnounce, SwarmDone, SwarmLeases, SwarmWant
from atoll.wire.swarm import HeldOutSum, Holder, SwarmLease
from tests.hub.membership import Running, event_texts
from tests.hub.swarm.test_stage_checkpoints import Site, reach, site, swarm
from tests.hub.swarm.test_swarm_service import announced, ledger_of, ready

__all__ = ["site", "swarm"]

SIZES = [2, 3]


def measure(swarm: Running, *, sums: list[HeldOutSum], evaluate: bool = True) -> None:
    """Bring the microbatches of the present step through, and its evaluation."""
    for peer in swarm.members:
        place = ready(peer)
        held = SwarmAnnounce(
            place.epoch, place.stage, place.step, history=place.history, held_out=SIZES
        )
        announced(peer, held)
    first, ledger = swarm.members[0], ledger_of(swarm)
    holders = [ledger.members[f"w{slot}"].holder for slot in range(2)]
    for lease in leases_of(swarm, holders[0]):
        body = SwarmDone(
            lease.step, lease.index, lease.lease, lease.stages, holders, evaluate=evaluate
        )
        assert isinstance(first.request(body), Done)
    for lease, found in zip(leases_of(swarm, holders[0]), sums, strict=True):
        assert not lease.stages
        body = SwarmDone(
            lease.step, lease.index, lease.lease, [], holders[1:], held_out=found
        )  # fmt: skip
        for _ in range(2):  # a repeated report changes nothing
            assert isinstance(first.request(body), Done)


def leases_of(swarm: Running, driver: Holder) -> list[SwarmLease]:
    answer = swarm.members[0].request(SwarmWant(driver.epoch, room=9))
    assert isinstance(answer, SwarmLeases)
    return answer.leases


def stored(hub: HubServer, job: str) -> list[tuple[str, int, dict[str, float]]]:
    assert hub.hub is not None
    points = hub.call(hub.hub.stores.metrics.read(job))
    return [(p["member"], p["step"], p["values"]) for p in points]


def test_an_evaluation_becomes_one_point(swarm: Running) -> None:
    measure(swarm, sums=[HeldOutSum(6.0, 3), HeldOutSum(1.0, 1)])
    expected = {"held_out_loss_sum": 7.0, "held_out_tokens": 4.0}
    assert stored(swarm.hub, swarm.job) == [("w1", 0, expected)]
    assert swarm.hub.hub is not None
    swarm.hub.hub.grouped.swarm._runtimes.clear()  # all that a restart of the hub loses
    measure(swarm, sums=[HeldOutSum(6.5, 3), HeldOutSum(1.0, 1)])
    assert stored(swarm.hub, swarm.job) == [("w1", 0, expected)]


def test_the_last_one_tells_loss_and_accuracy(swarm: Running) -> None:
    ready(swarm.members[0])
    ledger_of(swarm).saves.last = 0
    measure(swarm, sums=[HeldOutSum(6.0, 3, 2), HeldOutSum(1.0, 1, 0), HeldOutSum(1.0, 4, 4)])
    expected = {"held_out_loss": 1.0, "held_out_accuracy": 6 / 8}
    assert stored(swarm.hub, swarm.job) == [("w1", 0, expected)]
    ledger_of(swarm).saves.saved = 0
    assert ledger_of(swarm).finished


def test_a_loss_that_is_no_number_is_told(swarm: Running) -> None:
    measure(swarm, sums=[HeldOutSum(math.nan, 3), HeldOutSum(1.0, 1)])
    assert stored(swarm.hub, swarm.job) == []
    assert event_texts(swarm.hub, swarm.job, "not-measured") == [
        "the held-out loss of step 0 is not a number"
    ]


def test_two_who_store_at_once_tell_it_once(swarm: Running) -> None:
    ready(swarm.members[0])
    assert swarm.hub.hub is not None
    service = swarm.hub.hub.grouped.swarm

    async def both() -> None:
        runtime = service._runtimes[swarm.job]
        lost = Evaluated(0, 1, "w1", HeldOutSum(math.nan, 3), last=False)
        runtime.ledger.evaluations.found.append(lost)
        await asyncio.gather(service._store(runtime), service._store(runtime))
        assert not runtime.ledger.evaluations.found

    swarm.hub.call(both())
    assert len(event_texts(swarm.hub, swarm.job, "not-measured")) == 1


@pytest.mark.parametrize("saved_first", [True, False])
def test_a_checkpoint_is_scored_whatever_is_first(site: Site, saved_first: bool) -> None:
    swarm = site.swarm
    ledger = reach(site, 7)
    ledger.begin(7)
    ledger.saves.saved = 7  # members that come back keep this state

    def save() -> None:
        for slot in range(2):
            site.save(slot, at=7)

    if saved_first:
        save()
        assert score_of(site) is None
    measure(swarm, sums=[HeldOutSum(6.0, 3), HeldOutSum(2.0, 1)])
    if not saved_first:
        save()
    assert score_of(site) == 2.0


def score_of(site: Site) -> float | None:
    path = site.at_hub(f"{checkpoint_folder(7)}/{MANIFEST_NAME}")
    return decode_manifest(path.read_bytes()).score
