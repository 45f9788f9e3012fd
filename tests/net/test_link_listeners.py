"""What those hear who listen to a link, and what it counts."""

from __future__ import annotations

import asyncio
import logging

import pytest

from atoll.wire.frames import decode, encode_relay
from atoll.wire.messages import Beat, Done, MemberLost, Message, Roster, RosterReply, pack, unpack
from tests.net.scripted import WAIT_S, ScriptedHub, run


def test_notices_and_payloads_keep_their_order() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        received: list[object] = []
        link.on_notice(received.append)
        link.on_relay(lambda source, payload: received.append((source, bytes(payload))))
        expected: list[object] = []
        for index in range(5):
            await peer.relay("job/w1", "job/w0", bytes([index]))
            await peer.tell(MemberLost("job", index, "w1"))
            expected += [("job/w1", bytes([index])), MemberLost("job", index, "w1")]
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        await asking
        assert received == expected
        await link.close()

    run(scenario())


def test_failing_listener_does_not_silence_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        received: asyncio.Queue[Message] = asyncio.Queue()

        def broken(notice: Message) -> None:
            raise RuntimeError("a listener broke")

        link.on_notice(broken)
        link.on_notice(received.put_nowait)
        await peer.tell(Done())
        assert await received.get() == Done()
        assert link.connected
        await link.close()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "a listener broke" in caplog.text


def test_payloads_are_views_into_the_received_frame() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        got: asyncio.Queue[memoryview] = asyncio.Queue()
        link.on_relay(lambda source, payload: got.put_nowait(payload))
        await peer.relay("job/w1", "job/w0", b"x" * 100)
        payload = await got.get()
        assert isinstance(payload.obj, bytes)
        assert len(payload.obj) > len(payload) == 100
        await link.close()

    run(scenario())


def test_counters_split_control_and_relay_with_headers() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        before = link.counters.sent_control_bytes
        deadline = asyncio.get_running_loop().time() + WAIT_S
        sent = await link.relay("job/r", (b"head", b"piece"), deadline=deadline)
        assert sent == len(encode_relay("job/r", "job/w0", b"headpiece"))
        assert link.counters.sent_relay_bytes == sent
        await link.notify(Done())
        assert link.counters.sent_control_bytes - before == len(pack(Done()))
        before = link.counters.received_control_bytes
        got = asyncio.Event()
        link.on_relay(lambda source, payload: got.set())
        await peer.tell(Done())
        await peer.relay("job/r", "job/w0", b"abc")
        await got.wait()
        assert link.counters.received_control_bytes - before == len(pack(Done()))
        assert link.counters.received_relay_bytes == len(encode_relay("job/w0", "job/r", b"abc"))
        assert link.counters.sent_bytes > sent
        await link.close()

    run(scenario())


def test_answers_to_heartbeats_tell_how_long_the_way_is() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(heartbeat_s=0.02)
        assert link.counters.round_trip_s == 0.0
        frame = unpack(decode(await peer.transport.receive()))
        assert isinstance(frame.body, Beat)
        await asyncio.sleep(0.1)
        await peer.answer(frame, Done())
        async with asyncio.timeout(WAIT_S):
            while not link.counters.round_trip_s:
                await asyncio.sleep(0.01)
        assert 0.1 <= link.counters.round_trip_s < WAIT_S
        await link.close()

    run(scenario())
