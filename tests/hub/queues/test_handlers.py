"""Queues over a session: who may, what is answered, what large payloads need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import (
    Done,
    Failure,
    Message,
    QueueAck,
    QueueClaim,
    QueueEntry,
    QueueItems,
    QueueOpen,
    QueueOptions,
    QueuePut,
    QueuePutDone,
    QueuePutMany,
    QueuePutManyDone,
    TopicItems,
    TopicPublish,
    TopicRead,
)
from tests.hub.peer import Peer

SPEC = """
[job]
name = "{name}"
queues = ["pool/experience", "pool/weights"]
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


def member_of_a_job(hub: HubServer, name: str) -> Peer:
    """Submit a job and connect as its first member; the session says its name."""
    assert hub.hub is not None
    stores = hub.hub.stores
    job = hub.call(stores.jobs.create(SPEC.format(name=name), files={})).job
    token = hub.call(stores.auth.issue_job_token(job, member="w0", attempt=1))
    return Peer(hub, f"{job}/w0", token=token)


def refused(answer: Message) -> bool:
    return isinstance(answer, Failure) and answer.error["kind"] == "AuthError"


def test_a_job_has_its_own_queues_and_those_its_file_lists(hub: HubServer) -> None:
    with member_of_a_job(hub, "one") as one, member_of_a_job(hub, "two") as two:
        own = one.session.removesuffix("/w0")
        for queue in (f"{own}/experience", "pool/experience"):
            assert isinstance(one.request(QueuePut(queue, "k", b"x")), QueuePutDone)
        shared = two.request(QueueClaim("pool/experience", 60.0))
        assert isinstance(shared, QueueItems)
        assert [item.key for item in shared.items] == ["k"]
        for ask in (
            QueuePut(f"{own}/experience", "k2", b""),
            QueueClaim(f"{own}/experience", 60.0),
            QueueOpen("pool/other", QueueOptions()),
            QueueOpen("node/box", QueueOptions()),
            TopicPublish(f"{own}/weights", [QueueEntry("k")]),
            TopicRead(f"{own}/weights", "s"),
        ):
            assert refused(two.request(ask)), ask


def test_the_hubs_own_queues_have_fixed_options(hub: HubServer) -> None:
    with Peer(hub, "ops") as operator:
        assert refused(operator.request(QueueOpen("node/box", QueueOptions(max_items=1))))


def test_many_in_one_message_and_topics_over_a_session(hub: HubServer) -> None:
    with Peer(hub, "ops") as peer:
        opened = peer.request(QueueOpen("s/q", QueueOptions(max_items=2, overflow="wait")))
        assert isinstance(opened, Done)
        many = QueuePutMany("s/q", [QueueEntry("a", b"1"), QueueEntry("b", b"2")])
        stored = peer.request(many)
        assert isinstance(stored, QueuePutManyDone)
        again = peer.request(many)
        assert isinstance(again, QueuePutManyDone)
        assert (again.seqs, again.duplicates) == (stored.seqs, [0, 1])
        waits = peer.ask(QueuePut("s/q", "c", b"3", wait_s=10.0))
        claimed = peer.request(QueueClaim("s/q", 60.0))
        assert isinstance(claimed, QueueItems)
        peer.request(QueueAck("s/q", claimed.items[0].lease))
        admitted = peer.answer(waits)
        assert isinstance(admitted, QueuePutDone)
        assert admitted.waited_s > 0
        peer.request(TopicRead("s/t", "me", limit=0))
        peer.request(TopicPublish("s/t", [QueueEntry("x", b"9")]))
        found = peer.request(TopicRead("s/t", "me", wait_s=5.0))
        assert isinstance(found, TopicItems)
        assert [item.payload for item in found.items] == [b"9"]


def test_a_large_payload_stays_until_its_item_is_done(hub: HubServer, tmp_path: Path) -> None:
    payload = bytes(300_000)
    name = hashlib.sha256(payload).hexdigest()
    assert hub.hub is not None
    blobs, database = hub.hub.stores.blobs, hub.hub.stores.database

    def held() -> int:
        (count,) = database.read_now(
            lambda c: c.execute(
                "SELECT count(*) FROM blob_holds WHERE sha256 = ?", (name,)
            ).fetchone()
        )
        return int(count)

    with Peer(hub, "ops") as peer, HubClient(hub.url, hub.operator_token) as client:
        missing = peer.request(QueuePut("s/large", "a", b"", blob=name))
        assert isinstance(missing, Failure)
        assert client.put_blob(payload) == name
        for key in "ab":
            put = peer.request(QueuePut("s/large", key, b"", blob=name))
            assert isinstance(put, QueuePutDone)
        peer.request(QueuePut("s/large", "a", b"", blob=name))  # a duplicate holds nothing
        assert held() == 2
        (row,) = [row for row in client.queues() if row["queue"] == "s/large"]
        assert row["bytes"] == 2 * len(payload)
        claimed = peer.request(QueueClaim("s/large", 60.0, limit=2))
        assert isinstance(claimed, QueueItems)
        assert [item.blob for item in claimed.items] == [name, name]
        client.get_blob(name, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == payload
        for left, item in zip((1, 0), claimed.items, strict=True):
            peer.request(QueueAck("s/large", item.lease))
            assert held() == left
        assert blobs.has(name)  # for another hour
