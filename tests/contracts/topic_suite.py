"""What every topic promises; each backend inherits this suite."""

from __future__ import annotations

import asyncio

import pytest

from atoll.errors import HubError, QueueFull, StorageFull
from atoll.hub.queues.queues import Queues
from atoll.wire.messages import QueueEntry, QueueOptions, TopicItem, TopicItems
from tests.contracts.queue_base import BOUND_S, LEASE_S, QueueBase


def entries(*keys: str) -> list[QueueEntry]:
    return [QueueEntry(key, key.encode()) for key in keys]


def keys_of(found: TopicItems) -> list[str]:
    return [item.key for item in found.items]


class TopicContract(QueueBase):
    """A log that each subscription reads for itself."""

    def test_every_subscription_has_a_place_of_its_own(self) -> None:
        async def test(queue: Queues) -> None:
            topics = queue.topics
            for name in ("s", "r"):
                await topics.read("t", name, limit=0)
            done = await topics.publish("t", entries("a", "b", "c"))
            found = await topics.read("t", "s", limit=2)
            assert keys_of(found) == ["a", "b"]
            assert [item.seq for item in found.items] == done.seqs[:2]
            after = found.items[-1].seq
            assert keys_of(await topics.read("t", "s", after=after, limit=5)) == ["c"]
            assert keys_of(await topics.read("t", "r", limit=5)) == ["a", "b", "c"]
            await topics.ack("t", "s", seq=after)
            await topics.ack("t", "s", seq=done.seqs[0])  # earlier: nothing
            assert keys_of(await topics.read("t", "s", limit=5)) == ["c"]
            assert keys_of(await topics.read("t", "r", limit=5)) == ["a", "b", "c"]

        self.with_queue(test)

    def test_late_subscriptions_begin_at_oldest_or_newest(self) -> None:
        async def test(queue: Queues) -> None:
            topics = queue.topics
            await topics.publish("t", entries("a", "b"))
            assert keys_of(await topics.read("t", "new", limit=5)) == []
            assert keys_of(await topics.read("t", "old", limit=5, start="oldest")) == ["a", "b"]
            await topics.publish("t", entries("c"))
            assert keys_of(await topics.read("t", "new", limit=5, start="oldest")) == ["c"]

        self.with_queue(test)

    def test_a_key_is_kept_once(self) -> None:
        async def test(queue: Queues) -> None:
            first = await queue.topics.publish("t", entries("a"))
            again = await queue.topics.publish("t", entries("a", "b"))
            assert (again.seqs[0], again.duplicates) == (first.seqs[0], [0])
            assert keys_of(await queue.topics.read("t", "s", limit=5, start="oldest")) == ["a", "b"]

        self.with_queue(test)

    def test_retention_reports_missed_messages(self) -> None:
        async def test(queue: Queues) -> None:
            topics = queue.topics
            limits = {"n": QueueOptions(max_items=3), "b": QueueOptions(max_bytes=6)}
            for topic, options in limits.items():
                await queue.declare(topic, options, topic=True)
                await topics.read(topic, "s", limit=0)
                for key in "abcde":
                    await topics.publish(topic, entries(key * 2))
                found = await topics.read(topic, "s", limit=9)
                assert keys_of(found) == ["cc", "dd", "ee"]
                assert found.missed
            await queue.declare("age", QueueOptions(keep_s=100.0), topic=True)
            await topics.publish("age", entries("old"))
            self.clock.advance(90.0)
            await topics.publish("age", entries("young"))
            found = await topics.read("age", "s", limit=9, start="oldest")
            assert keys_of(found) == ["old", "young"]
            self.clock.advance(20.0)
            await queue.expire()
            found = await topics.read("age", "s", limit=9)
            assert (keys_of(found), found.missed) == (["young"], True)
            with pytest.raises(QueueFull):
                await topics.publish("n", entries("w", "x", "y", "z"))

        self.with_queue(test)

    def test_all_who_wait_hear_of_one_item(self) -> None:
        async def test(queue: Queues) -> None:
            waiting = [
                asyncio.ensure_future(queue.topics.read("t", f"s{n}", wait_s=BOUND_S))
                for n in range(5)
            ]
            while queue.wait_list.number("t") < 5:
                await asyncio.sleep(0.001)
            await queue.topics.publish("t", entries("a"))
            assert [keys_of(found) for found in await asyncio.gather(*waiting)] == [["a"]] * 5

        self.with_queue(test)

    def test_queues_are_no_topics_and_topics_no_queues(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("items", key="a", payload=b"")
            await queue.topics.publish("t", entries("a"))
            with pytest.raises(HubError, match="this is a queue"):
                await queue.topics.publish("items", entries("b"))
            with pytest.raises(HubError, match="this is a topic"):
                await queue.claim("t", lease_s=LEASE_S)
            with pytest.raises(HubError, match="no such subscription"):
                await queue.topics.ack("t", "nobody", seq=1)
            kinds = {row["queue"]: row["kind"] for row in await queue.rows()}
            assert (kinds["items"], kinds["t"]) == ("queue", "topic")

        self.with_queue(test)

    def test_an_acknowledgement_that_failed_is_stored_when_repeated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def first(queue: Queues) -> None:
            done = await queue.topics.publish("t", entries("a", "b"))
            await queue.topics.read("t", "s", limit=0, start="oldest")

            async def full(*_: object) -> None:
                raise StorageFull("no room is left")

            with monkeypatch.context() as patch:
                patch.setattr(queue.backend("t"), "set_position", full)
                with pytest.raises(StorageFull):
                    await queue.topics.ack("t", "s", seq=done.seqs[0])
            await queue.topics.ack("t", "s", seq=done.seqs[0])

        async def second(queue: Queues) -> None:
            assert keys_of(await queue.topics.read("t", "s", limit=9)) == ["b"]

        self.with_queue(first)
        self.with_queue(second)

    def test_positions_and_items_outlive_the_hub(self) -> None:
        async def first(queue: Queues) -> None:
            done = await queue.topics.publish("t", entries("a", "b", "c"))
            await queue.topics.read("t", "s", limit=0, start="oldest")
            await queue.topics.ack("t", "s", seq=done.seqs[0])

        async def second(queue: Queues) -> None:
            assert keys_of(await queue.topics.read("t", "s", limit=9)) == ["b", "c"]
            (row,) = [row for row in await queue.rows() if row["queue"] == "t"]
            assert (row["ready"], row["subscribers"], row["kind"]) == (3, 1, "topic")

        self.with_queue(first)
        self.with_queue(second)

    def test_of_two_first_reads_at_once_the_first_decides(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published = asyncio.Event()

        async def first(queue: Queues) -> None:
            await queue.declare("t", QueueOptions(), topic=True)
            backend = queue.backend("t")
            last = backend.last
            calls = 0

            async def slow_last(topic: str) -> int:
                nonlocal calls
                calls += 1
                if calls > 1:
                    await published.wait()
                    return await last(topic)
                found = await last(topic)
                await queue.topics.publish("t", entries("a"))
                published.set()
                return found

            with monkeypatch.context() as patch:
                patch.setattr(backend, "last", slow_last)
                read = [queue.topics.read("t", "s", limit=0) for _ in range(2)]
                places = {found.position for found in await asyncio.gather(*read)}
            assert len(places) == 1

        async def second(queue: Queues) -> None:
            assert keys_of(await queue.topics.read("t", "s", limit=9)) == ["a"]

        self.with_queue(first)
        self.with_queue(second)

    def test_all_who_read_at_once_hear_that_they_missed_something(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("t", QueueOptions(max_items=2), topic=True)
            names = ["s", "r"]
            for name in names:
                await queue.topics.read("t", name, limit=0)
            for key in "abcd":
                await queue.topics.publish("t", entries(key))
            backend = queue.backend("t")
            positions = backend.positions

            async def slow_positions(topic: str) -> dict[str, int]:
                await asyncio.sleep(0.05)
                return await positions(topic)

            with monkeypatch.context() as patch:
                patch.setattr(backend, "positions", slow_positions)
                reads = [queue.topics.read("t", name, limit=9) for name in names]
                found = await asyncio.gather(*reads)
            assert [(keys_of(one), one.missed) for one in found] == [(["c", "d"], True)] * 2
            again = await queue.topics.read("t", "s", limit=9, after=found[0].items[-1].seq)
            assert (keys_of(again), again.missed) == ([], False)

        self.with_queue(test)

    def test_items_missed_while_a_read_waits_are_reported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("t", QueueOptions(max_items=2), topic=True)
            await queue.topics.read("t", "s", limit=0)
            backend = queue.backend("t")
            peek, late = backend.peek, ["a", "b", "c", "d"]

            async def slow_peek(topic: str, *, after: int, limit: int) -> list[TopicItem]:
                while late:
                    await queue.topics.publish("t", entries(late.pop(0)))
                return await peek(topic, after=after, limit=limit)

            with monkeypatch.context() as patch:
                patch.setattr(backend, "peek", slow_peek)
                found = await queue.topics.read("t", "s", limit=9)
            assert (keys_of(found), found.missed) == (["c", "d"], True)
            again = await queue.topics.read("t", "s", limit=9, after=found.items[-1].seq)
            assert (keys_of(again), again.missed) == ([], False)

        self.with_queue(test)
