"""Jobs of rarer kinds on a scene: a SWARM and a modular model, in the midst of their work."""

from __future__ import annotations

from atoll.swarm.routing import BOTH
from atoll.wire.messages import (
    SwarmAnnounce,
    SwarmDone,
    SwarmLeases,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)
from atoll.wire.paths import PathAsk, PathReport, PathShard, PathTrained, PathTurn
from atoll.wire.swarm import Holder, SwarmFailure
from tests.dashboard.scene import Scene
from tests.hub.peer import Peer

SWARM = """
[job]
name = "large"
nodes = 6
[train]
steps = 400
[strategy]
preset = "ddp"
inner = "swarm"
[swarm]
stages = 3
microbatches = 8
needs_gb = [2.1, 1.4, 2.3]
"""
RATES = {0: 44.0, 1: 22.0, 2: 14.0, 3: 20.0, 4: 16.0, 5: 15.0}
"""Rows per second by slot."""


def announced(peer: Peer, body: SwarmAnnounce) -> SwarmPlace:
    place = peer.request(body)
    assert isinstance(place, SwarmPlace), place
    return place


def serving(peers: list[Peer]) -> list[tuple[SwarmPlace, Holder]]:
    """Let members take over stages: 0, then 1 and 2 in turns."""
    found = []
    for slot, peer in enumerate(peers):
        stage = 0 if slot == 0 else 1 + slot % 2
        rate, dial = 1 / (BOTH * RATES[slot]), ["10.0.0.1:7"] if slot % 2 else []
        place = announced(peer, SwarmAnnounce(stage=stage, row_s=rate, dial=dial))
        body = SwarmAnnounce(place.epoch, stage, place.step, row_s=rate, dial=dial)
        place = announced(peer, body)
        assert place.ready
        found.append((place, Holder(f"w{slot}", place.epoch)))
    return found


def train(peers: list[Peer], places: list[tuple[SwarmPlace, Holder]], *, count: int) -> None:
    """Bring microbatches through; w3 failed at the last of them."""
    driver, holder = peers[0], places[0][1]
    leases = driver.request(SwarmWant(holder.epoch, room=count))
    assert isinstance(leases, SwarmLeases)
    for number, lease in enumerate(leases.leases):
        path = [holder, places[2 if number % 3 else 4][1], places[1 if number % 2 else 5][1]]
        body = SwarmDone(
            lease.step, lease.index, lease.lease, [0, 1, 2], path, queues={"w1": 3.0, "w2": 1.0}
        )  # fmt: skip
        driver.request(body)
    failures = [SwarmFailure("w3", "the member is not connected", 60.0)]
    driver.request(SwarmWatch(holder.epoch, 0, failures=failures))
    peers[2].request(SwarmWatch(places[2][1].epoch, 0, direct_bytes=1, relayed_bytes=3))


def swarm(scene: Scene) -> tuple[str, list[Peer]]:
    """Return a SWARM of three stages within a step, and its members."""
    job = str(scene.http.post("/api/jobs", json={"spec": SWARM}).json()["job"])
    peers = scene.start(job)
    train(peers, serving(peers), count=5)
    return job, peers


MODULAR = """
[job]
name = "modular"
nodes = 3
[train]
steps = 450
[strategy]
preset = "dipaco"
[dipaco]
modules = [2, 2]
"""
SHARDS = [PathShard(9, 400), PathShard(7, 300), PathShard(0, 0), PathShard(2, 90)]


def modular(scene: Scene) -> tuple[str, list[list[int]], int]:
    """Return a modular model of four paths, the paths of each member, and who has two."""
    job = str(scene.http.post("/api/jobs", json={"spec": MODULAR}).json()["job"])
    peers = scene.start(job)
    waiting = [peer.ask(PathAsk(-1, phases=3, process="a", shards=SHARDS)) for peer in peers]
    answers = [peer.answer(asked) for peer, asked in zip(peers, waiting, strict=True)]
    turns = [turn for turn in answers if isinstance(turn, PathTurn)]
    dealt = [turn.paths for turn in turns]
    assert sorted(map(len, dealt)) == [1, 1, 2]
    busy = dealt.index(max(dealt, key=len))
    scene.measure(peers[busy], 40, path=float(dealt[busy][1]))
    early = (busy + 1) % 3
    body = [
        PathReport(path, 150, tokens=2400, loss=2.5, held_out=2.75, measured=100)
        for path in dealt[early]
    ]
    peers[early].ask(PathTrained(0, body, turns[early].rounds, turns[early].versions))
    return job, dealt, busy
