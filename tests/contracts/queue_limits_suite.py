"""What every queue promises about many items at once, about its limits and about dead letters."""

from __future__ import annotations

import asyncio

import pytest

from atoll.errors import ConfigError, HubError, QueueFull
from atoll.hub.queues.queues import QueueDepth, Queues
from atoll.hub.queues.validation import MAX_PAYLOAD_BYTES
from atoll.wire.messages import QueueEntry, QueueOptions
from tests.contracts.queue_base import BOUND_S, LEASE_S, MAX_ATTEMPTS, QueueBase


def entries(*keys: str, nbytes: int = 1) -> list[QueueEntry]:
    return [QueueEntry(key, key[:1].encode() * nbytes) for key in keys]


async def keys_in(queue: Queues, name: str = "q") -> list[str]:
    return [item.key for item in await queue.claim(name, lease_s=LEASE_S, limit=1000)]


class LimitsContract(QueueBase):
    """Options, room, and what becomes of too much."""

    def test_many_are_stored_in_order_each_once(self) -> None:
        async def test(queue: Queues) -> None:
            first = await queue.put_many("q", entries("a", "b", "c"))
            assert (sorted(first.seqs), first.duplicates) == (first.seqs, [])
            again = await queue.put_many("q", entries("b", "d", "a", "d"))
            assert again.seqs[0] == first.seqs[1]
            assert again.seqs[2] == first.seqs[0]
            assert again.seqs[1] == again.seqs[3]
            assert again.duplicates == [0, 2, 3]
            assert await keys_in(queue) == ["a", "b", "c", "d"]

        self.with_queue(test)

    def test_batched_acks_and_extensions_name_the_lost(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put_many("q", entries("a", "b", "c"))
            leases = [i.lease for i in await queue.claim("q", lease_s=LEASE_S, limit=3)]
            self.clock.advance(LEASE_S - 1)
            assert await queue.extend_many("q", [*leases[:2], "7.x"], lease_s=LEASE_S) == ["7.x"]
            self.clock.advance(2)
            (third,) = await queue.claim("q", lease_s=LEASE_S, limit=3)
            assert third.key == "c"
            assert await queue.ack_many("q", leases) == [leases[2]]
            assert await queue.ack_many("q", [leases[0], third.lease]) == []
            assert await queue.depths() == {}

        self.with_queue(test)

    def test_a_full_queue_refuses_all_of_a_message_or_none(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=3))
            await queue.put_many("q", entries("a", "b"))
            with pytest.raises(QueueFull, match="full"):
                await queue.put_many("q", entries("c", "d"))
            assert (await queue.put_many("q", entries("b", "a"))).duplicates == [0, 1]
            await queue.put_many("q", entries("e"))
            assert await keys_in(queue) == ["a", "b", "e"]
            with pytest.raises(QueueFull):  # what is leased takes room, too
                await queue.put_many("q", entries("f"))

        self.with_queue(test)

    def test_options_hold_though_idle_queues_are_dropped_meanwhile(self) -> None:
        async def test(queue: Queues) -> None:
            backend = queue.backend("new")
            write = backend.set_options

            async def slow_write(name: str, options: QueueOptions, *, topic: bool) -> None:
                await queue.expire()  # as the hub's timer, while the disk is busy
                await write(name, options, topic=topic)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "set_options", slow_write)
                await queue.declare("new", QueueOptions(max_items=1))
            await queue.put_many("new", entries("a"))
            with pytest.raises(QueueFull):
                await queue.put_many("new", entries("b"))

        self.with_queue(test)

    def test_bytes_are_bounded_as_items_are(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_bytes=100))
            await queue.put_many("q", entries("a", nbytes=60))
            with pytest.raises(QueueFull):
                await queue.put_many("q", entries("b", nbytes=60))
            await queue.put_many("q", entries("c", nbytes=40))
            (row,) = [row for row in await queue.rows() if row["queue"] == "q"]
            assert (row["bytes"], row["ready"], row["max_bytes"]) == (100, 2, 100)

        self.with_queue(test)

    def test_dropping_queue_keeps_leased_and_newest_items(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=3, overflow="drop-oldest"))
            await queue.put_many("q", entries("a", "b", "c"))
            (held,) = await queue.claim("q", lease_s=LEASE_S)
            await queue.put_many("q", entries("d"))
            await queue.put_many("q", entries("e"))
            assert await queue.depths() == {"q": QueueDepth(ready=2, leased=1)}
            assert await keys_in(queue) == ["d", "e"]
            with pytest.raises(QueueFull):
                await queue.put_many("q", entries("f"))
            await queue.ack("q", lease=held.lease)
            await queue.put_many("q", entries("f"))

        self.with_queue(test)

    def test_producers_wait_in_line_until_there_is_room(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=2, overflow="wait"))
            await queue.put_many("q", entries("a", "b"))
            waiting = []
            for key in "cd":
                put = queue.put_many("q", entries(key), wait_s=BOUND_S)
                waiting.append(asyncio.ensure_future(put))
                await self.until_producers_wait(queue, len(waiting))
            a, b = await queue.claim("q", lease_s=LEASE_S, limit=2)
            await queue.ack("q", lease=a.lease)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert [put.done() for put in waiting] == [True, False]
            await queue.ack("q", lease=b.lease)
            seqs = [(await put).seqs[0] for put in waiting]
            assert seqs == sorted(seqs)
            assert await keys_in(queue) == ["c", "d"]

        self.with_queue(test)

    def test_producer_that_times_out_leaves_no_item(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=1, overflow="wait"))
            await queue.put_many("q", entries("a"))
            with pytest.raises(QueueFull):
                await queue.put_many("q", entries("b"), wait_s=0.05)
            gone = asyncio.ensure_future(queue.put_many("q", entries("c"), wait_s=BOUND_S))
            await self.until_producers_wait(queue, 1)
            gone.cancel()
            await asyncio.wait([gone])
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            await queue.ack("q", lease=item.lease)
            await queue.put_many("q", entries("d"))
            assert await keys_in(queue) == ["d"]

        self.with_queue(test)

    def test_a_producer_is_not_overtaken_by_a_smaller_one(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=2, overflow="wait"))
            await queue.put_many("q", entries("a"))
            large = asyncio.ensure_future(queue.put_many("q", entries("b", "c"), wait_s=BOUND_S))
            await self.until_producers_wait(queue, 1)
            small = asyncio.ensure_future(queue.put_many("q", entries("d"), wait_s=BOUND_S))
            await self.until_producers_wait(queue, 2)
            for expected in (["a"], ["b", "c"], ["d"]):
                items = await queue.claim("q", lease_s=LEASE_S, limit=5, wait_s=BOUND_S)
                assert [item.key for item in items] == expected
                await queue.ack_many("q", [item.lease for item in items])
            assert len((await large).seqs + (await small).seqs) == 3

        self.with_queue(test)

    def test_more_room_lets_waiting_producers_in(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=1, overflow="wait"))
            await queue.put_many("q", entries("a"))
            put = asyncio.ensure_future(queue.put_many("q", entries("b"), wait_s=BOUND_S))
            await self.until_producers_wait(queue, 1)
            await queue.declare("q", QueueOptions(max_items=2, overflow="wait"))
            assert len((await put).seqs) == 1

        self.with_queue(test)

    def test_items_nobody_took_for_too_long_are_dropped(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(keep_s=100.0))
            await queue.put_many("q", entries("a", "b"))
            (held,) = await queue.claim("q", lease_s=1000.0)
            self.clock.advance(60.0)
            await queue.put_many("q", entries("c"))
            self.clock.advance(50.0)
            await queue.expire()
            assert await queue.depths() == {"q": QueueDepth(ready=1, leased=1)}
            assert await keys_in(queue) == ["c"]
            await queue.ack("q", lease=held.lease)

        self.with_queue(test)

    def test_dead_letters_are_put_back_or_discarded(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put_many("q", entries("a", "b", "c"))
            for _ in range(MAX_ATTEMPTS):
                for item in await queue.claim("q", lease_s=LEASE_S, limit=3):
                    await queue.release("q", lease=item.lease, reason="no")
            letters = await queue.dead_letters("q")
            assert [letter.key for letter in letters] == ["a", "b", "c"]
            assert await queue.requeue("q", [letters[1].seq]) == 1
            assert await queue.requeue("q", [letters[1].seq]) == 0
            (item,) = await queue.claim("q", lease_s=LEASE_S, limit=3)
            assert (item.key, item.payload, item.attempt) == ("b", b"b", 1)
            await queue.ack("q", lease=item.lease)
            assert await queue.discard("q", [letters[0].seq]) == 1
            assert await queue.requeue("q") == 1
            assert await keys_in(queue) == ["c"]
            assert await queue.dead_letters("q") == []

        self.with_queue(test)

    def test_dead_letters_take_no_room(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=1, max_attempts=1))
            await queue.put_many("q", entries("a"))
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            await queue.release("q", lease=item.lease)
            await queue.put_many("q", entries("b"))
            assert await queue.depths() == {"q": QueueDepth(ready=1, dead=1)}

        self.with_queue(test)

    def test_rows_tell_depth_age_rates_and_limits(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.declare("q", QueueOptions(max_items=20, overflow="wait"))
            for step in range(10):
                await queue.put_many("q", entries(f"{step}a"))
                self.clock.advance(1.0)
            (row,) = [row for row in await queue.rows() if row["queue"] == "q"]
            assert row["kind"] == "queue"
            assert row["oldest_s"] == pytest.approx(10.0)
            assert row["in_per_s"] == pytest.approx(1.0)
            assert (row["out_per_s"], row["overflow"], row["max_items"]) == (0.0, "wait", 20)

        self.with_queue(test)

    def test_options_and_payloads_that_make_no_sense_are_refused(self) -> None:
        async def test(queue: Queues) -> None:
            for options in (
                QueueOptions(max_items=-1),
                QueueOptions(max_attempts=0),
                QueueOptions(keep_s=float("nan")),
                QueueOptions(overflow="explode"),  # type: ignore[arg-type]
            ):
                with pytest.raises(ConfigError):
                    await queue.declare("q", options)
            with pytest.raises(HubError, match="too large for a message"):
                await queue.put_many("q", entries("a", nbytes=MAX_PAYLOAD_BYTES + 1))
            with pytest.raises(HubError, match="too many items in one put"):
                await queue.put_many("q", [])
            with pytest.raises(HubError, match="no blobs"):
                await queue.put("q", key="a", payload=b"", blob="0" * 64)

        self.with_queue(test)

    async def until_producers_wait(self, queue: Queues, number: int) -> None:
        """Wait until so many puts stand in line."""
        async with asyncio.timeout(BOUND_S):
            while queue.state("q").waiting != number:
                await asyncio.sleep(0.001)
