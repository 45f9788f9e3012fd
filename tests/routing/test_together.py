"""Members that share the work of sharding: threads here, with queues in memory and at a hub."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.checkpoint import Weights
from atoll.data import Dataset, train_documents
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from atoll.queues import Channel, HubChannel, InMemoryChannel, Item, Queue, QueueRegistry, Topic
from atoll.routing import together
from atoll.routing.features import FeatureModel, Features
from atoll.routing.parts import Work
from atoll.routing.reader import train_reader
from atoll.routing.together import compute_together, train_reader_once
from tests.patience import PATIENCE_S


class Killed(Exception):
    """Stands for the end of a process: nothing is acknowledged or released after it."""


class Place:
    """A member's queues and topics."""

    def __init__(self, channel: Channel, member: str) -> None:
        self.member, self.stopping = member, False
        self._registry = QueueRegistry(channel, prefix="job", reader=member)

    def queue(self, name: str, **options: object) -> Queue:
        return self._registry.queue(name, **options)

    def topic(self, name: str, **options: object) -> Topic:
        return self._registry.topic(name, **options)


@pytest.fixture(params=["alone", "hub"])
def channels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Channel]]:
    """Return a channel for each of three members."""
    with contextlib.ExitStack() as stack:
        if request.param == "alone":
            yield [InMemoryChannel()] * 3
            return
        options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
        hub = stack.enter_context(HubServer(options))
        token = hub.operator_token
        made: list[Channel] = []
        for number in range(3):
            link = stack.enter_context(connect(hub.url, make_hello(f"session{number}", token)))
            made.append(
                HubChannel(
                    link, client=lambda: HubClient(hub.url, token), scratch=tmp_path / str(number)
                )
            )
            stack.callback(made[-1].close)
        yield made


@pytest.fixture
def work(reader: FeatureModel, dataset: Dataset) -> Work:
    documents = train_documents(dataset, seed=0, held_out=0.2, longest=100)
    return Work(reader, documents, dataset.tokenizer, size=10)


class Merges:
    """What members merge, thread-safe."""

    def __init__(self) -> None:
        self.found: list[Features] = []

    def __call__(self, features: Features) -> None:
        self.found.append(features)


def in_threads(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def expected(work: Work) -> Features:
    return np.concatenate([work.compute(part) for part in work.parts()])


def test_members_share_the_parts_and_one_merges(channels: list[Channel], work: Work) -> None:
    merges, counts, ended = Merges(), Counter[str](), Counter[bool]()

    def member(number: int) -> None:
        class Counted(Work):
            def compute(self, part: range) -> Features:
                counts[f"{part.start}"] += 1
                return super().compute(part)

        own = Counted(work.reader, work.documents, work.tokenizer, work.size)
        done = compute_together(Place(channels[number], f"w{number}"), own, merges)
        ended[done] += 1

    in_threads(*(lambda n=n: member(n) for n in range(3)))
    assert ended == {True: 3}
    assert len(merges.found) == 1
    assert np.array_equal(merges.found[0], expected(work))
    assert set(counts.values()) == {1}


def test_a_lost_members_part_is_done_by_another(
    channels: list[Channel], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "WAIT_S", 0.1)
    first = Place(channels[0], "w0")
    helper = together._Helper(first, work, 1.0)
    helper.offer()
    claimed = helper.queue.claim(2, lease_s=1.0)  # and never acknowledged
    assert len(claimed) == 2
    merges = Merges()
    assert compute_together(Place(channels[1], "w1"), work, merges, lease_s=1.0)
    assert np.array_equal(merges.found[0], expected(work))


def test_the_merge_waits_for_parts_that_others_hold(
    channels: list[Channel], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "WAIT_S", 0.1)
    slow = together._Helper(Place(channels[0], "w0"), work, 60.0)
    slow.offer()
    (item,) = slow.queue.claim(1, lease_s=60.0)
    merges, halted = Merges(), threading.Event()

    def finish() -> None:
        # Only after the other member has computed everything else.
        others = len(slow.parts) - 1
        while len(slow.found) < others:
            slow.read()
            halted.wait(0.05)
        slow.compute(item)

    in_threads(
        finish, lambda: compute_together(Place(channels[1], "w1"), work, merges, lease_s=60.0)
    )
    assert np.array_equal(merges.found[0], expected(work))


def test_a_member_killed_while_it_merges_is_replaced(
    channels: list[Channel], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "WAIT_S", 0.1)

    def die(features: Features) -> None:
        raise Killed

    with pytest.raises(Killed):
        compute_together(Place(channels[0], "w0"), work, die, lease_s=1.0)
    merges = Merges()
    assert compute_together(Place(channels[1], "w1"), work, merges, lease_s=1.0)
    assert np.array_equal(merges.found[0], expected(work))


def test_what_is_computed_is_not_computed_again(channels: list[Channel], work: Work) -> None:
    assert compute_together(Place(channels[0], "w0"), work, Merges())

    class Refusing(Work):
        def compute(self, part: range) -> Features:
            raise AssertionError(part)

    later = Refusing(work.reader, work.documents, work.tokenizer, work.size)
    again = Merges()
    assert compute_together(Place(channels[1], "w1"), later, again)
    assert again.found == []


def test_a_member_that_is_asked_to_stop_leaves(channels: list[Channel], work: Work) -> None:
    place = Place(channels[0], "w0")

    def stop(done: int, parts: int) -> None:
        place.stopping = place.stopping or done >= 2

    merges = Merges()
    assert not compute_together(place, work, merges, progress=stop)
    assert compute_together(Place(channels[1], "w1"), work, merges)
    assert np.array_equal(merges.found[0], expected(work))


def test_a_member_that_holds_the_merge_can_be_stopped(
    channels: list[Channel], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "WAIT_S", 0.1)
    other, place = together._Helper(Place(channels[0], "w0"), work, 60.0), Place(channels[1], "w1")
    other.offer()
    (held,) = other.queue.claim(1, lease_s=60.0)
    hold = together._Helper.hold

    def stopped(self: together._Helper, merging: Item) -> None:
        place.stopping = True
        held.release("a member that goes on would compute it")
        hold(self, merging)

    monkeypatch.setattr(together._Helper, "hold", stopped)
    assert not compute_together(place, work, Merges(), lease_s=60.0)
    other.read()
    assert set(other.parts) - set(other.found) == {held.key}


def test_one_member_trains_the_small_model_for_all(
    channels: list[Channel], dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    made: list[Weights | None] = []

    def counted(*args: Any, **named: Any) -> Weights | None:
        calls.append(1)
        return train_reader(*args, **named)

    monkeypatch.setattr(together, "train_reader", counted)
    in_threads(
        *(
            lambda n=n: made.append(
                train_reader_once(Place(channels[n], f"w{n}"), dataset, seed=0, steps=2)
            )
            for n in range(3)
        )
    )
    assert len(calls) == 1
    alone = train_reader(dataset, seed=0, steps=2)
    assert alone is not None
    for weights in made:
        assert weights is not None
        assert weights.options == alone.options
        assert all(torch.equal(weights.state[name], alone.state[name]) for name in alone.state)


def test_a_member_lost_while_it_trains_is_replaced(
    channels: list[Channel], dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "WAIT_S", 0.1)

    def die(*args: Any, **named: Any) -> Weights | None:
        raise Killed

    monkeypatch.setattr(together, "train_reader", die)
    with pytest.raises(Killed):
        train_reader_once(Place(channels[0], "w0"), dataset, seed=0, steps=2, lease_s=1.0)
    monkeypatch.setattr(together, "train_reader", train_reader)
    assert train_reader_once(Place(channels[1], "w1"), dataset, seed=0, steps=2, lease_s=1.0)


def test_a_member_stopped_while_it_trains_gives_it_back(
    channels: list[Channel], dataset: Dataset
) -> None:
    leaving = Place(channels[0], "w0")

    def stop_soon(*args: Any, **named: Any) -> Weights | None:
        leaving.stopping = True
        return train_reader(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "train_reader", stop_soon)
        assert train_reader_once(leaving, dataset, seed=0, steps=3) is None
    assert train_reader_once(Place(channels[1], "w1"), dataset, seed=0, steps=3)
