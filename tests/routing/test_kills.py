"""A member of the sharding is killed at every message it sends: another one ends the work alike."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.data import Dataset, train_documents
from atoll.queues import Channel, InMemoryChannel
from atoll.queues.serialization import Parts
from atoll.routing import together
from atoll.routing.features import FeatureModel, Features
from atoll.routing.parts import Work
from atoll.routing.reader import train_reader
from atoll.routing.together import compute_together, train_reader_once
from atoll.wire.messages import Message
from tests.patience import PATIENCE_S
from tests.routing.test_together import Killed, Merges, Place, expected

LEASE_S = 0.2
STEPS = 1


class Mortal:
    """A channel of a member that is killed at its `last` message.

    Args:
        inner: The other members' channel, too.
        last: Messages before the end; None: it lives.
        sent: Whether the queues still get the message at which it is killed.
    """

    def __init__(self, inner: Channel, *, last: int | None = None, sent: bool = False) -> None:
        self._inner, self._last, self._sent = inner, last, sent
        self.count = 0

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        self.count += 1
        if self._last is not None and self.count > self._last:
            if self._sent and self.count == self._last + 1:
                self._inner.ask(body, timeout_s=timeout_s)
            raise Killed
        return self._inner.ask(body, timeout_s=timeout_s)

    def ask_later(self, body: Message, *, timeout_s: float) -> concurrent.futures.Future[Message]:
        found: concurrent.futures.Future[Message] = concurrent.futures.Future()
        found.set_result(self.ask(body, timeout_s=timeout_s))
        return found

    def put_large(self, parts: Parts) -> tuple[str, int]:
        return self._inner.put_large(parts)

    def release_large(self, sha256: str) -> None:
        self._inner.release_large(sha256)

    def large(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        return self._inner.large(sha256)

    def close(self) -> None:
        pass


@pytest.fixture
def work(reader: FeatureModel, dataset: Dataset) -> Work:
    documents = train_documents(dataset, seed=0, held_out=0.2, longest=100)
    return Work(reader, documents, dataset.tokenizer, size=10)


def shard(
    channel: Channel, member: str, dataset: Dataset, work: Work, merges: Merges,
    lease_s: float = LEASE_S,
) -> bool:  # fmt: skip
    """Do all that a member of the sharding does."""
    place = Place(channel, member)
    train_reader_once(place, dataset, seed=0, steps=STEPS, lease_s=lease_s)
    return compute_together(place, work, merges, lease_s=lease_s)


def results(channel: Channel, work: Work) -> dict[str, list[Features]]:
    """Return the features that were published, by part."""
    read: dict[str, list[Features]] = {}
    topic = Place(channel, "reader").topic(f"{work.name()}-done")
    seen = topic.subscribe("reader", start="oldest")
    while entries := seen.read(100):
        for entry in entries:
            read.setdefault(entry.key, []).append(np.asarray(entry.value["features"]))
    return read


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
@pytest.mark.every(2)
def test_members_killed_at_every_message_lose_nothing(
    work: Work, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    monkeypatch.setattr(together, "WAIT_S", 0.05)
    weights = train_reader(dataset, seed=0, steps=STEPS)

    def trained(*args: object, progress: Callable[[int, int], bool], **named: object) -> object:
        return weights if progress(1, STEPS) else None

    monkeypatch.setattr(together, "train_reader", trained)  # the same again, without the seconds
    calm = Mortal(InMemoryChannel())
    assert shard(calm, "w0", dataset, work, Merges(), PATIENCE_S)  # which extends no lease
    truth = expected(work)
    ends = Counter[str]()
    for last in range(calm.count):
        queues, dead, merges = InMemoryChannel(), Merges(), Merges()
        with pytest.raises(Killed):
            shard(Mortal(queues, last=last, sent=sent), "w0", dataset, work, dead)
        assert shard(queues, "w1", dataset, work, merges)
        merged = dead.found + merges.found
        assert merged, last
        assert all(np.array_equal(one, truth) for one in merged), last
        done = results(queues, work)
        assert sum(len(found[0]) for found in done.values()) == len(truth), last
        for found in done.values():
            assert all(np.array_equal(one, found[0]) for one in found), last
        ends["merged" if dead.found else "not merged"] += 1
    assert len(ends) == 2, ends
