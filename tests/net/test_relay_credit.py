from __future__ import annotations

import asyncio

import pytest

from atoll.clock import VirtualClock
from atoll.errors import DeadlineExceeded, FrameTooLarge, PeerLost
from atoll.net.link import Link
from atoll.wire.frames import encode_relay
from atoll.wire.messages import Credit, Roster, RosterReply, Undeliverable
from tests.net.scripted import WAIT_S, Peer, ScriptedHub, run

PIECE = bytes(100)
FRAME_BYTES = len(encode_relay("job/r", "job/w0", PIECE))


def soon() -> float:
    return asyncio.get_running_loop().time() + WAIT_S


def send(link: Link, count: int, *, to: str = "job/r") -> asyncio.Task[int]:
    return asyncio.create_task(link.relay_all(to, [(b"", PIECE)] * count, deadline=soon()))


async def taken(peer: Peer) -> int:
    """Return how many relay frames the link sends until it waits.

    It waits when all had many turns and no frame came: no clock tells, that a stall would put on.
    """
    count = 0
    while True:
        receiving = asyncio.create_task(peer.expect_relay())
        for _ in range(100):
            if receiving.done():
                break
            await asyncio.sleep(0)
        if not receiving.done():
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            return count
        await receiving
        count += 1


def test_no_more_than_the_window_is_under_way_to_one_receiver() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=3 * FRAME_BYTES + 5)
        sending = send(link, 8)
        assert await taken(peer) == 3
        assert link.owed_bytes("job/r") == 3 * FRAME_BYTES
        await peer.tell(Credit("job/r", 2 * FRAME_BYTES))
        assert await taken(peer) == 2
        await peer.tell(Credit("job/r", 3 * FRAME_BYTES))
        assert await taken(peer) == 3
        assert await sending == 8 * FRAME_BYTES
        await link.close()

    run(scenario())


def test_each_receiver_has_a_window_of_its_own() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=2 * FRAME_BYTES + 10)
        blocked = send(link, 3)
        assert await taken(peer) == 2
        free = send(link, 2, to="job/s")
        assert await taken(peer) == 2
        await free
        assert not blocked.done()
        blocked.cancel()
        await link.close()

    run(scenario())


def test_waiting_senders_to_one_receiver_are_served_in_order() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=FRAME_BYTES)
        await send(link, 1)
        await peer.expect_relay()
        tasks = [
            asyncio.create_task(link.relay("job/r", (b"", bytes([n]) * 100), deadline=soon()))
            for n in range(4)
        ]
        order = []
        for _ in tasks:
            await peer.tell(Credit("job/r", FRAME_BYTES))
            order.append((await peer.expect_relay()).payload[0])
        assert order == [0, 1, 2, 3]
        await asyncio.gather(*tasks)
        await link.close()

    run(scenario())


def test_a_sender_that_gives_up_returns_its_credit() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=FRAME_BYTES)
        await send(link, 1)
        await peer.expect_relay()
        with pytest.raises(DeadlineExceeded, match="job/r did not take all chunks"):
            await link.relay("job/r", (b"", PIECE), deadline=soon() - WAIT_S + 0.02)
        waiting = send(link, 1)
        await peer.tell(Credit("job/r", FRAME_BYTES))
        await peer.expect_relay()
        await waiting
        assert link.owed_bytes("job/r") == FRAME_BYTES
        await link.close()

    run(scenario())


def test_reconnect_restores_the_full_window() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked(window_bytes=2 * FRAME_BYTES)
        sending = send(link, 6)
        assert await taken(peer) == 2
        peer.transport.cut()
        peer = await hub.welcome(window_bytes=2 * FRAME_BYTES, resumed=True)
        assert await taken(peer) == 2
        await peer.tell(Credit("job/r", 2 * FRAME_BYTES))
        assert await taken(peer) == 2
        assert await sending == 6 * FRAME_BYTES
        await link.close()

    run(scenario())


def test_credit_that_nobody_owes_does_not_widen_the_window() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=2 * FRAME_BYTES)
        await peer.tell(Credit("job/r", 100 * FRAME_BYTES))
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        await asking
        sending = send(link, 5)
        assert await taken(peer) == 2
        sending.cancel()
        await link.close()

    run(scenario())


def test_a_sender_that_waits_for_a_lost_receiver_gets_peer_lost() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=2 * FRAME_BYTES)
        sending = send(link, 5)
        assert await taken(peer) == 2
        await peer.tell(Credit("job/r", 2 * FRAME_BYTES))
        await peer.tell(Undeliverable("job/r"))
        with pytest.raises(PeerLost, match="job/r"):
            await sending
        await link.close()

    run(scenario())


def test_a_receiver_that_came_back_can_be_sent_to_again() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=2 * FRAME_BYTES)
        notices: asyncio.Queue[object] = asyncio.Queue()
        link.on_notice(notices.put_nowait)
        await send(link, 1)
        await peer.expect_relay()
        await peer.tell(Credit("job/r", FRAME_BYTES))
        await peer.tell(Undeliverable("job/r"))
        assert await notices.get() == Undeliverable("job/r")
        await send(link, 2)
        assert await taken(peer) == 2
        await link.close()

    run(scenario())


def test_an_undeliverable_between_two_pieces_stops_the_rest() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=1000 * FRAME_BYTES)
        sending = send(link, 500)  # more than the connection buffers: it waits for its reader
        for _ in range(3):
            await peer.expect_relay()
        await peer.tell(Undeliverable("job/r"))
        await taken(peer)
        with pytest.raises(PeerLost):
            await sending
        await link.close()

    run(scenario())


def test_a_frame_that_never_fits_the_window_is_refused() -> None:
    async def scenario() -> None:
        link, _ = await ScriptedHub().linked(window_bytes=FRAME_BYTES - 1)
        with pytest.raises(FrameTooLarge, match="larger than the hub's window"):
            await link.relay("job/r", (b"", PIECE), deadline=soon())
        await link.close()

    run(scenario())


def test_a_held_link_reads_nothing_until_it_is_released() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        got: list[int] = []
        link.on_relay(lambda source, payload: got.append(payload[0]))
        link.hold_reading()
        for index in range(5):
            await peer.relay("job/r", "job/w0", bytes([index]))
        await asyncio.sleep(0.05)
        assert len(got) <= 1  # a read that was under way takes one more
        link.release_reading()
        for _ in range(50):
            await asyncio.sleep(0)
        assert got == [0, 1, 2, 3, 4]
        await link.close()

    run(scenario())


def test_held_link_reads_while_a_call_waits() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=FRAME_BYTES)
        link.hold_reading()
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.relay("job/r", "job/w0", b"in front of the answer")
        await peer.answer(pending, RosterReply([]))
        await asking
        sending = send(link, 3)
        for _ in range(3):
            await peer.expect_relay()
            await peer.tell(Credit("job/r", FRAME_BYTES))
        await sending
        await link.close()

    run(scenario())


def test_held_link_does_not_think_the_hub_silent() -> None:
    async def scenario() -> None:
        hub, clock = ScriptedHub(), VirtualClock()
        link, _ = await hub.linked(dead_after_s=0.05, clock=clock)
        link.hold_reading()
        for _ in range(4):
            clock.advance(0.06)
            await asyncio.sleep(0.05)  # the link looks oftener: timers of one loop come in order
        assert hub.dials == 1
        link.release_reading()
        await link.close()

    run(scenario())


def test_a_relay_given_up_while_it_is_sent_owes_nothing() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked(window_bytes=1000 * FRAME_BYTES)
        sending = send(link, 500)  # more than the connection buffers: it waits for its reader
        booked = -1
        while booked != link.owed_bytes("job/r"):
            booked = link.owed_bytes("job/r")
            await asyncio.sleep(0)
        sending.cancel()
        count = await taken(peer)
        await peer.tell(Credit("job/r", count * FRAME_BYTES))
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        await asking
        assert link.owed_bytes("job/r") == 0
        await link.close()

    run(scenario())
