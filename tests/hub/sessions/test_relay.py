from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.hub.sessions.relay import Relay
from atoll.hub.sessions.send_queue import RelayFrame, SendQueue
from atoll.wire.limits import CHUNK_BYTES, WINDOW_BYTES
from atoll.wire.messages import Beat, Credit, Done, Failure, Undeliverable, Welcome
from tests.hub.peer import WAIT_S, Peer, chunk
from tests.patience import PROMPT_S


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder: Path = tmp_path_factory.mktemp("hub")
    options = HubOptions(
        data=folder / "data", jobs=folder / "runs", reducers=False, reconnect_grace_s=1.0
    )
    with HubServer(options) as server:
        yield server


def relay_of(hub: HubServer) -> Relay:
    assert hub.hub is not None
    return hub.hub.sessions.relay


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def credited(peer: Peer, nbytes: int) -> None:
    """Wait until that many bytes were credited, and not one more."""
    seen = 0
    while seen < nbytes:
        seen += peer.notice(Credit).nbytes
    assert seen == nbytes


def window_of(peer: Peer) -> int:
    """Return the window that the hub sent this peer."""
    assert isinstance(peer.welcome, Welcome)
    return peer.welcome.window_bytes


def fill(peer: Peer, to: str, payload: bytes) -> int:
    """Send as much as the window allows; return the bytes sent."""
    sent = size = peer.relay(to, payload)
    while sent + size <= window_of(peer):
        sent += peer.relay(to, payload)
    return sent


def test_the_same_bytes_arrive_and_are_credited(hub: HubServer) -> None:
    with Peer(hub, "a/w0") as w0, Peer(hub, "a/reducer") as reducer:
        payload = chunk(1000)
        sent = w0.relay("a/reducer", payload)
        got = reducer.relay_from()
        assert (got.source, got.to, bytes(got.payload)) == ("a/w0", "a/reducer", payload)
        credited(w0, sent)


def test_every_relayed_byte_is_credited_once(hub: HubServer) -> None:
    with Peer(hub, "b/w0") as w0, Peer(hub, "b/reducer") as reducer:
        payload = bytes(CHUNK_BYTES)
        for _ in range(3):
            sent = fill(w0, "b/reducer", payload)
            for _ in range(sent // CHUNK_BYTES):
                reducer.relay_from()
            credited(w0, sent)


def test_unknown_receiver_is_told_after_the_credit(hub: HubServer) -> None:
    with Peer(hub, "c/w0") as w0:
        sent = w0.relay("c/missing", b"x")
        assert w0.notice(Undeliverable).to == "c/missing"
        assert [n for n in w0.notices if isinstance(n, Credit)] == [Credit("c/missing", sent)]


def test_member_of_another_job_is_out_of_reach(hub: HubServer) -> None:
    with Peer(hub, "d/w0") as w0, Peer(hub, "e/w0") as other:
        w0.relay("e/w0", b"x")
        assert w0.notice(Undeliverable).to == "e/w0"
        with pytest.raises(TimeoutError):
            other.relay_from(timeout_s=0.1)


def test_frame_that_names_another_sender_closes_with_1008(hub: HubServer) -> None:
    with Peer(hub, "f/w0") as w0:
        w0.relay("f/w1", b"x", source="f/w1")
        failure = w0.notice(Failure)
        assert "another sender" in failure.error["what"]
        with pytest.raises(ConnectionClosed) as caught:
            w0.read(time.monotonic() + WAIT_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008


def test_sender_that_overruns_its_window_is_closed_with_1008(hub: HubServer) -> None:
    slow = Peer(hub, "g/slow", receive_buffer_bytes=8192)
    with Peer(hub, "g/w0") as w0:
        with pytest.raises(ConnectionClosed) as caught:
            overrun(w0, "g/slow")
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
    slow.cut()


def overrun(peer: Peer, to: str) -> None:
    for _ in range(20):
        fill(peer, to, bytes(CHUNK_BYTES))
    while True:
        peer.read(time.monotonic() + WAIT_S)


def stuff(sender: Peer, to: str, payload: bytes, relay: Relay) -> None:
    """Send as a correct sender does, until the window is full and no credit comes.

    That none comes for a while may only be the busy machine: the frames wait in the hub, too.
    """
    outstanding, deadline = 0, time.monotonic() + WAIT_S
    while True:
        outstanding += sender.relay(to, payload)
        while outstanding + len(payload) + 100 > window_of(sender):
            assert time.monotonic() < deadline
            try:
                outstanding -= sender.notice(Credit, timeout_s=0.5).nbytes
            except TimeoutError:
                if relay.queued_bytes(sender.session, to) > window_of(sender) // 2:
                    return


def test_stalled_reader_bounds_memory_and_delays_no_other(hub: HubServer) -> None:
    slow = Peer(hub, "h/slow", receive_buffer_bytes=8192)
    with Peer(hub, "h/w0") as w0, Peer(hub, "h/w1") as w1, Peer(hub, "h/fast") as fast:
        payload = bytes(CHUNK_BYTES)
        relay = relay_of(hub)
        stuff(w0, "h/slow", payload, relay)
        assert relay.queued_bytes("h/w0", "h/slow") <= window_of(w0)
        began = time.monotonic()
        assert isinstance(w0.request(Beat()), Done)
        for sender in (w0, w1):
            sent = fill(sender, "h/fast", payload)
            for _ in range(sent // CHUNK_BYTES):
                fast.relay_from()
        assert time.monotonic() - began < PROMPT_S
        assert relay.queued_bytes("h/w0", "h/slow") <= window_of(w0)
        slow.cut()
        assert w0.notice(Undeliverable).to == "h/slow"
        assert relay.queued_bytes("h/w0", "h/slow") == 0


def test_lost_receiver_credits_all_that_was_dropped(hub: HubServer) -> None:
    slow = Peer(hub, "i/slow", receive_buffer_bytes=8192)
    with Peer(hub, "i/w0") as w0:
        sent = fill(w0, "i/slow", bytes(CHUNK_BYTES))
        slow.cut()
        w0.notice(Undeliverable)
        total = sum(n.nbytes for n in w0.notices if isinstance(n, Credit))
        assert total == sent


def test_receiver_in_a_blip_gets_what_waited(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    monkeypatch.setattr(hub.hub.sessions, "_grace_s", WAIT_S)  # however long it takes to come back
    with Peer(hub, "k/w0") as w0:
        Peer(hub, "k/w1").cut()
        sent = w0.relay("k/w1", b"later")
        with Peer(hub, "k/w1") as again:
            assert bytes(again.relay_from().payload) == b"later"
        credited(w0, sent)


def test_returning_sender_has_a_full_window(
    hub: HubServer,
) -> None:
    slow = Peer(hub, "l/slow", receive_buffer_bytes=8192)
    relay = relay_of(hub)
    for _ in range(3):
        w0 = Peer(hub, "l/w0")
        fill(w0, "l/slow", bytes(CHUNK_BYTES))
        assert isinstance(w0.request(Beat()), Done)
        assert relay.queued_bytes("l/w0", "l/slow") <= window_of(w0)
        w0.cut()
    slow.cut()


def test_control_frames_overtake_waiting_chunks() -> None:
    order: list[bytes] = []
    on_written: list[RelayFrame] = []

    async def run() -> None:
        outbox = SendQueue(on_written=on_written.append)
        gate = asyncio.Semaphore(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            await gate.acquire()
            order.append(message["bytes"])

        for number in range(3):
            outbox.put_relayed(RelayFrame("w0", 1, b"chunk%d" % number))
        writer = asyncio.create_task(outbox.drain(send))
        await asyncio.sleep(0)  # the writer now waits with the first chunk in its hand
        outbox.put_control(b"control")
        for _ in range(4):
            gate.release()
        while len(on_written) < 3:
            await asyncio.sleep(0)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        assert (outbox.relay_bytes, outbox.control_bytes) == (0, 0)

    asyncio.run(run())
    assert order == [b"chunk0", b"control", b"chunk1", b"chunk2"]


def test_credit_of_a_broken_connection_is_not_given_to_the_next() -> None:
    sent: list[bytes] = []

    async def run() -> None:
        outbox = SendQueue(on_written=lambda frame: None)
        outbox.put_control(b"answer")
        outbox.put_control(b"credit", transient=True)
        outbox.drop_transient()
        assert outbox.control_bytes == len(b"answer")

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message["bytes"])

        writer = asyncio.create_task(outbox.drain(send))
        while outbox.control_bytes:
            await asyncio.sleep(0)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)

    asyncio.run(run())
    assert sent == [b"answer"]


def test_frame_whose_writing_was_cut_off_stays_first() -> None:
    async def run() -> list[bytes]:
        outbox = SendQueue(on_written=lambda frame: None)
        outbox.put_relayed(RelayFrame("w0", 1, b"first"))
        outbox.put_relayed(RelayFrame("w0", 1, b"second"))
        sent: list[bytes] = []

        async def stuck(message: MutableMapping[str, Any]) -> None:
            await asyncio.Event().wait()

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message["bytes"])

        for connection in (stuck, send):
            writer = asyncio.create_task(outbox.drain(connection))
            for _ in range(5):
                await asyncio.sleep(0)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        return sent

    assert asyncio.run(run()) == [b"first", b"second"]


def test_windows_shrink_with_connections_to_two_chunks(hub: HubServer) -> None:
    relay = relay_of(hub)
    windows = [relay.window_for(sessions) for sessions in (1, 10, 50, 100, 10_000)]
    assert windows[0] == windows[1] == WINDOW_BYTES
    assert windows == sorted(windows, reverse=True)
    assert 50 * windows[3] <= 64 * 2**20
    assert windows[-1] >= 2 * CHUNK_BYTES
