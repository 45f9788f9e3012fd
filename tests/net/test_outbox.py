from __future__ import annotations

import asyncio
import threading

import pytest

from atoll.errors import StorageFull
from atoll.net.outbox import Outbox, drop_oldest, keep_every_second
from atoll.wire.limits import MAX_CONTROL_BYTES
from atoll.wire.messages import Acked, Failure, LogLines, Message, Metrics, Point
from tests.net.scripted import WAIT_S, Peer, ScriptedHub, at_once, run
from tests.net.small_hub import SmallHub, answer, linked


def lines(seq: int, items: list[str]) -> Message:
    return LogLines("job", "w0", seq, items)


def measurements(seq: int, points: list[Point]) -> Message:
    return Metrics("one", seq, points)


async def shipped(peer: Peer) -> LogLines:
    """Take the next batch and say that all of it is durable."""
    pending, message = await peer.expect(LogLines)
    await peer.answer(pending, Acked(message.seq + len(message.lines) - 1))
    return message


def test_items_go_out_in_batches_numbered_from_one() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        outbox = Outbox(link, lines, batch=3)
        for index in range(7):
            outbox.add(f"line {index}")
        outbox.start()
        got = [await shipped(peer) for _ in range(3)]
        assert [(batch.seq, len(batch.lines)) for batch in got] == [(1, 3), (4, 3), (7, 1)]
        assert await outbox.flush(timeout_s=WAIT_S)
        assert await outbox.close(timeout_s=WAIT_S)
        await link.close()

    run(scenario())


def test_items_that_come_one_by_one_are_gathered() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        outbox = Outbox(link, lines, batch=20, gather_s=0.5)
        outbox.start()
        outbox.add("first")
        assert (await shipped(peer)).lines == ["first"]
        for index in range(10):
            outbox.add(f"line {index}")
            await asyncio.sleep(0.001)
        assert len((await shipped(peer)).lines) > 1
        await outbox.close(timeout_s=0.0)
        await link.close()

    run(scenario())


def test_unacknowledged_message_is_resent_under_its_number() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        outbox = Outbox(link, lines)
        outbox.retry = at_once
        outbox.start()
        for item in "abcd":
            outbox.add(item)
        pending, message = await peer.expect(LogLines)
        if message.lines != ["a", "b", "c", "d"]:
            pytest.fail(f"one batch was expected, not {message.lines}")
        await peer.answer(pending, Acked(2))
        again = await shipped(peer)
        assert (again.seq, again.lines) == (3, ["c", "d"])
        assert await outbox.flush(timeout_s=WAIT_S)
        await outbox.close(timeout_s=0.0)
        await link.close()

    run(scenario())


def test_a_batch_cut_in_the_middle_is_sent_again_unchanged() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        outbox = Outbox(link, lines)
        outbox.start()
        outbox.add("a")
        await peer.expect(LogLines)
        outbox.add("b")
        peer.transport.cut()
        peer = await hub.welcome()
        assert await shipped(peer) == lines(1, ["a"])
        assert await shipped(peer) == lines(2, ["b"])
        assert await outbox.close(timeout_s=WAIT_S)
        await link.close()

    run(scenario())


def test_a_hub_that_cannot_store_now_is_asked_again() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        outbox = Outbox(link, lines)
        outbox.retry = at_once
        outbox.start()
        outbox.add("a")
        pending, _ = await peer.expect(LogLines)
        await peer.answer(pending, Failure(StorageFull("the disk is full").to_dict()))
        assert await shipped(peer) == lines(1, ["a"])
        await outbox.close(timeout_s=WAIT_S)
        await link.close()

    run(scenario())


def test_a_full_outbox_thins_only_what_was_never_sent() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        outbox = Outbox(link, lines, capacity=8)
        outbox.start()
        outbox.add("first")
        pending, message = await peer.expect(LogLines)
        for index in range(9):
            outbox.add(str(index))
        await peer.answer(pending, Acked(1))
        rest = await shipped(peer)
        assert message.lines == ["first"]
        assert (rest.seq, rest.lines) == (2, ["0", "2", "4", "5", "6", "7", "8"])
        await outbox.close(timeout_s=WAIT_S)
        await link.close()

    run(scenario())


def test_flush_fails_without_a_hub_or_link() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        outbox = Outbox(link, lines)
        outbox.start()
        assert await outbox.flush(timeout_s=WAIT_S)
        outbox.add("a")
        await peer.expect(LogLines)
        assert not await outbox.flush(timeout_s=0.02)
        await link.close()
        assert not await outbox.flush(timeout_s=WAIT_S)
        outbox.add("b")  # still never raises
        assert not await outbox.close(timeout_s=WAIT_S)

    run(scenario())


def test_thinning_keeps_the_newest() -> None:
    assert keep_every_second(list(range(10))) == [0, 2, 4, 5, 6, 7, 8, 9]
    assert drop_oldest(list(range(8))) == [2, 3, 4, 5, 6, 7]


def test_threads_lose_nothing_over_a_hub_restart() -> None:
    stored: dict[int, Point] = {}

    def keep(body: Message) -> Message:
        if isinstance(body, Metrics):
            for number, point in enumerate(body.points, start=body.seq):
                assert stored.setdefault(number, point) == point
        return answer(body)

    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        hub.answer = keep
        outbox = link.outbox(measurements)

        def produce(thread: int) -> None:
            for step in range(250):
                outbox.add(Point(0.0, step, thread, {"loss": 1.0}))

        threads = [threading.Thread(target=produce, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        hub.cut()
        for thread in threads:
            thread.join(WAIT_S)
        hub.cut()
        assert outbox.flush(timeout_s=WAIT_S)
        assert outbox.close(timeout_s=WAIT_S)
        assert sorted(stored) == list(range(1, 1001))
        for thread_number in range(4):
            steps = [p.step for _, p in sorted(stored.items()) if p.round == thread_number]
            assert steps == list(range(250))


def test_a_batch_too_large_for_a_frame_goes_in_smaller_ones() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        outbox = Outbox(link, lines, batch=6)
        large = "x" * (MAX_CONTROL_BYTES // 4)
        for index in range(6):
            outbox.add(f"{index}{large}")
        outbox.start()
        got = [await shipped(peer) for _ in range(2)]
        assert [(batch.seq, len(batch.lines)) for batch in got] == [(1, 3), (4, 3)]
        assert [line[0] for batch in got for line in batch.lines] == list("012345")
        assert await outbox.close(timeout_s=WAIT_S)
        await link.close()

    run(scenario())
