"""Members of a SWARM at a real hub over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.hub.server import HubServer
from atoll.swarm.ledger import Ledger
from atoll.wire.messages import (
    Done,
    Failure,
    Leaving,
    RoundJoin,
    RoundPlan,
    SwarmAnnounce,
    SwarmDone,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
    Verdict,
)
from atoll.wire.swarm import Holder, Share
from tests.hub.nodes.test_membership import Running, told, until, vote
from tests.hub.peer import Peer

TABLES = """
[strategy]
preset = "ddp"
inner = "swarm"
[swarm]
stages = 2
microbatches = 2
"""


@pytest.fixture
def swarm(hub: HubServer) -> Iterator[Running]:
    """A job of two stages, one for each of its two members."""
    group = Running(hub, more=TABLES)
    yield group
    group.close()


def ledger_of(swarm: Running) -> Ledger:
    assert swarm.hub.hub is not None
    return swarm.hub.hub.swarm.ledger(swarm.job)


def announced(peer: Peer, body: SwarmAnnounce) -> SwarmPlace:
    place = peer.request(body)
    assert isinstance(place, SwarmPlace), place
    return place


def ready(peer: Peer) -> SwarmPlace:
    place = announced(peer, SwarmAnnounce(dial=["10.0.0.1:7"]))
    body = SwarmAnnounce(epoch=place.epoch, stage=place.stage, step=place.step, restored=True)
    place = announced(peer, body)
    assert place.ready
    return place


def news(peer: Peer, body: SwarmWatch) -> SwarmNews:
    answer = peer.request(body)
    assert isinstance(answer, SwarmNews), answer
    return answer


def test_a_microbatch_is_leased_counted_and_announced(swarm: Running) -> None:
    first, second = swarm.members
    driver = ready(first)
    waiting = first.ask(SwarmWant(driver.epoch, room=1))
    other = ready(second)
    answer = first.answer(waiting)  # leased once every stage has a member
    assert isinstance(answer, SwarmLeases)
    (lease,) = answer.leases
    assert (lease.step, lease.index, lease.stages) == (0, 0, [0, 1])
    table = news(second, SwarmWatch(other.epoch, 0)).table
    watching = second.ask(SwarmWatch(other.epoch, 0, table=table))
    holders = [Holder("w0", driver.epoch), Holder("w1", other.epoch)]
    done = SwarmDone(0, lease.index, lease.lease, lease.stages, holders)
    assert isinstance(first.request(done), Done)
    told_by_hub = second.answer(watching)
    assert isinstance(told_by_hub, SwarmNews)
    assert told_by_hub.shares == [Share(lease.index, lease.lease, "w1")]


def test_the_table_names_peers_and_where_they_listen(swarm: Running) -> None:
    places = [ready(peer) for peer in swarm.members]
    peers = news(swarm.members[0], SwarmWatch(places[0].epoch, 0)).peers
    assert {(peer.member, peer.stage) for peer in peers} == {("w0", 0), ("w1", 1)}
    assert peers[0].dial == ["10.0.0.1:7"]


def test_a_member_that_leaves_takes_its_stage_along(swarm: Running) -> None:
    first, second = swarm.members
    place, _ = ready(first), ready(second)
    assert isinstance(second.request(Leaving("preempted")), Done)
    until(lambda: "no member serves stage 1" in ledger_of(swarm).paused())
    until(lambda: any("stage 1" in text for text in told(swarm.hub, swarm.job, "paused")))
    answer = news(first, SwarmWatch(place.epoch, 0))
    assert [peer.member for peer in answer.peers] == ["w0"]
    assert "stage 1" in answer.paused


def test_a_lost_ledger_is_rebuilt_from_its_members(swarm: Running) -> None:
    places = [ready(peer) for peer in swarm.members]
    assert swarm.hub.hub is not None
    swarm.hub.hub.swarm._runtimes.clear()  # all that a restart of the hub loses
    share = Share(1, places[0].epoch + 5, "w0")
    body = SwarmAnnounce(epoch=places[0].epoch, stage=0, step=3, folded=[share])
    again = announced(swarm.members[0], body)
    assert (again.epoch, again.step, again.ready, again.keep) == (places[0].epoch, 3, True, True)
    other = SwarmAnnounce(epoch=places[1].epoch, stage=1, step=3)
    assert announced(swarm.members[1], other).keep
    leases = swarm.members[0].request(SwarmWant(again.epoch, room=9))
    assert isinstance(leases, SwarmLeases)
    assert [(x.index, x.stages) for x in leases.leases] == [(0, [0, 1]), (1, [1])]
    assert min(x.lease for x in leases.leases) > share.lease


def test_stages_meet_in_rounds_of_their_own(swarm: Running) -> None:
    places = [ready(peer) for peer in swarm.members]
    early = swarm.members[0].request(RoundJoin(0, "stage0"))
    assert isinstance(early, Failure)
    assert "do not meet for this closing" in early.error["what"]
    leases = swarm.members[0].request(SwarmWant(places[0].epoch, room=2))
    assert isinstance(leases, SwarmLeases)
    holders = [Holder(f"w{n}", place.epoch) for n, place in enumerate(places)]
    for lease in leases.leases:
        body = SwarmDone(0, lease.index, lease.lease, lease.stages, holders)
        assert isinstance(swarm.members[0].request(body), Done)
    epochs = []
    for stage, (peer, place) in enumerate(zip(swarm.members, places, strict=True)):
        closing = news(peer, SwarmWatch(place.epoch, 0)).closing
        plan = peer.request(RoundJoin(0, f"stage{stage}", closing=closing))
        assert isinstance(plan, RoundPlan), plan
        assert (plan.group, plan.round, plan.members) == (stage, 0, [f"w{stage}"])
        assert ledger_of(swarm).step == 0
        verdict = peer.request(vote(plan))
        assert isinstance(verdict, Verdict)
        assert verdict.committed
        epochs.append(plan.epoch)
    assert len(set(epochs)) == 2
    assert ledger_of(swarm).step == 1
    assert news(swarm.members[0], SwarmWatch(places[0].epoch, 0)).step == 1


def test_a_job_that_is_no_swarm_has_no_ledger(running: Running) -> None:
    answer = running.members[0].request(SwarmAnnounce())
    assert isinstance(answer, Failure)
    assert "does not train as a SWARM" in answer.error["what"]
