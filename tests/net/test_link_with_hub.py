from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.errors import AuthError, DeadlineExceeded, PeerLost
from atoll.net.dispatcher import LIMIT_BYTES, Inbox, Reconnected, Relayed
from atoll.net.handshake import Replaced, make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import SyncLink, connect
from atoll.wire.limits import CHUNK_BYTES, WINDOW_BYTES
from atoll.wire.messages import (
    Beat,
    Done,
    QueueAck,
    QueueClaim,
    QueueItems,
    QueuePut,
    QueuePutDone,
    Undeliverable,
)
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S
MEGABYTES = 64
BUFFERS_BYTES = 48 * 2**20
"""More than the sockets of both ends and the WebSocket libraries ever hold on this machine."""


class HubProcess:
    """`python -m atoll.hub` on one port and folder, for as many lives as a test needs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.url = ""
        self.token = ""

    def start(self) -> None:
        """Start it and wait for its line."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll.hub", "--no-reducers", "--port", str(self.port)),
                *("--data", str(self._folder / "data"), "--jobs", str(self._folder / "jobs")),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline())
        self.port, self.url, self.token = ready["port"], ready["url"], ready["operator_token"]

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(WAIT_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def link(self, session: str) -> SyncLink:
        """Open a session; the operator's token may have any address."""
        return connect(self.url, make_hello(session, self.token), timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path_factory.mktemp("hub"))
    process.start()
    yield process
    process.kill()


def soon() -> float:
    return time.monotonic() + WAIT_S


def payload(arrival: object) -> memoryview:
    assert isinstance(arrival, Relayed)
    return arrival.payload


def drain(inbox: Inbox, count: int) -> int:
    return sum(len(payload(inbox.receive(deadline=soon()))) for _ in range(count))


def test_sixty_four_megabytes_cross_whole_and_in_order(hub: HubProcess) -> None:
    count = MEGABYTES * 2**20 // CHUNK_BYTES
    with hub.link("big/w0") as sender, hub.link("big/reducer") as receiver:
        inbox = receiver.subscribe(sources=["big/w0"])
        parts = ((index.to_bytes(4, "big"), bytes(CHUNK_BYTES)) for index in range(count))
        sending = sender.relay_later("big/reducer", parts, deadline=soon())
        for index in range(count):
            piece = payload(inbox.receive(deadline=soon()))
            assert int.from_bytes(piece[:4], "big") == index
            assert len(piece) == CHUNK_BYTES + 4
        assert sending.result(WAIT_S) == sender.counters.sent_relay_bytes
        assert receiver.counters.received_relay_bytes == sender.counters.sent_relay_bytes
        assert sender.counters.reconnects == receiver.counters.reconnects == 0


def test_two_that_send_before_they_read_do_not_block_each_other(hub: HubProcess) -> None:
    count = 3 * LIMIT_BYTES // CHUNK_BYTES
    parts = [(b"", bytes(CHUNK_BYTES))] * count

    def send_then_read(link: SyncLink, inbox: Inbox, to: str) -> int:
        link.relay_all(to, parts, deadline=soon())
        return drain(inbox, count)

    with (
        hub.link("both/w0") as one,
        hub.link("both/w1") as two,
        ThreadPoolExecutor(2) as pool,
    ):
        inboxes = one.subscribe(), two.subscribe()
        first = pool.submit(send_then_read, one, inboxes[0], "both/w1")
        second = pool.submit(send_then_read, two, inboxes[1], "both/w0")
        assert first.result() == second.result() == count * CHUNK_BYTES


def test_a_reader_that_stops_stops_its_sender_at_the_window(hub: HubProcess) -> None:
    count = 2 * (LIMIT_BYTES + WINDOW_BYTES + BUFFERS_BYTES) // CHUNK_BYTES
    with hub.link("slow/w0") as sender, hub.link("slow/reducer") as receiver:
        inbox = receiver.subscribe()
        parts = ((b"", bytes(CHUNK_BYTES)) for _ in range(count))
        sending = sender.relay_later("slow/reducer", parts, deadline=soon())
        sent = steady(sender)
        assert not sending.done()
        assert sent < count * CHUNK_BYTES
        with HubClient(hub.url, hub.token) as client:
            assert client.hub()["relay"]["sessions"] >= 2
        assert sender.request(Beat(), timeout_s=WAIT_S) == Done()  # control is not held up
        drain(inbox, count)
        sending.result(WAIT_S)
        assert sender.counters.reconnects == 0


def steady(link: SyncLink) -> int:
    """Return the bytes that a link has sent when they grow no more."""
    last, unchanged = -1, 0
    deadline = soon()
    while unchanged < 15:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        now = link.counters.sent_relay_bytes
        unchanged = unchanged + 1 if now == last and now > LIMIT_BYTES else 0
        last = now
    return last


def test_a_receiver_that_is_not_there_is_peer_lost(hub: HubProcess) -> None:
    with hub.link("lost/w0") as link:
        inbox = link.subscribe(notices=(Undeliverable,))
        with pytest.raises(PeerLost, match="lost/reducer"):
            link.relay_all("lost/reducer", [(b"", bytes(CHUNK_BYTES))] * 100, deadline=soon())
        assert inbox.receive(deadline=soon()) == Undeliverable("lost/reducer")


def test_an_unknown_token_is_refused(hub: HubProcess) -> None:
    with pytest.raises(AuthError):
        connect(hub.url, make_hello("x/w0", "guess"))


def test_a_newer_process_takes_the_session_over_for_good(hub: HubProcess) -> None:
    with hub.link("twice/w0") as old:
        inbox = old.subscribe()
        with hub.link("twice/w0") as new:
            with pytest.raises(Replaced, match="twice/w0"):
                inbox.receive(deadline=soon())
            assert new.request(Beat(), timeout_s=WAIT_S) == Done()
            assert isinstance(old.failed, Replaced)


def test_an_idle_session_outlives_its_heartbeats(hub: HubProcess) -> None:
    with hub.link("idle/w0") as link:
        assert link.welcome is not None
        before = link.counters.received_control_bytes
        deadline = soon()
        while link.counters.received_control_bytes == before:
            assert time.monotonic() < deadline, "the hub did not answer the heartbeat"
            time.sleep(0.05)
        assert link.counters.reconnects == 0


def test_requests_survive_a_hub_that_is_killed_and_started_again(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path)
    hub.start()
    try:
        with hub.link("job/w0") as link, hub.link("job/reducer") as receiver:
            back = receiver.subscribe(sources=["job/w0"], reconnects=True)
            answers: list[object] = []

            def claim() -> None:
                request = QueueClaim("job/work", lease_s=30.0, wait_s=WAIT_S)
                answers.append(link.request(request, timeout_s=WAIT_S))

            waiting = threading.Thread(target=claim)
            waiting.start()
            hub.kill()
            storing = threading.Thread(
                target=lambda: answers.append(
                    receiver.request(QueuePut("job/work", "k", b"item"), timeout_s=WAIT_S)
                )
            )
            storing.start()  # asked while nobody is there
            hub.start()
            for thread in (waiting, storing):
                thread.join(WAIT_S)
                assert not thread.is_alive()
            done = next(a for a in answers if isinstance(a, QueuePutDone))
            assert not done.duplicate
            items = next(a for a in answers if isinstance(a, QueueItems)).items
            assert [item.payload for item in items] == [b"item"]
            ack = QueueAck("job/work", items[0].lease)
            assert link.request(ack, timeout_s=WAIT_S) == Done()
            assert isinstance(back.receive(deadline=soon()), Reconnected)
            link.relay("job/reducer", (b"after", b""), deadline=soon())
            assert bytes(payload(back.receive(deadline=soon()))) == b"after"
            assert link.counters.reconnects == 1
    finally:
        hub.kill()


def test_a_stream_goes_on_after_the_hub_was_killed_in_the_middle(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path)
    hub.start()
    try:
        with hub.link("job/w0") as sender, hub.link("job/reducer") as receiver:
            inbox = receiver.subscribe(reconnects=True)
            count = 2 * MEGABYTES * 2**20 // CHUNK_BYTES
            parts = ((index.to_bytes(4, "big"), bytes(CHUNK_BYTES)) for index in range(count))
            sending = sender.relay_later("job/reducer", parts, deadline=soon())
            seen: list[int] = []
            while len(seen) < count // 8:
                seen.append(int.from_bytes(payload(inbox.receive(deadline=soon()))[:4], "big"))
            hub.kill()
            hub.start()
            while not quiet(inbox, seen) or not sending.done():
                pass
            # The sender may be back before its receiver is: then it hears that nobody is there.
            if not isinstance(sending.exception(), PeerLost):
                while seen[-1] != count - 1:  # what was quiet may be a hub that was stalled
                    note(inbox.receive(deadline=soon()), seen)
            assert seen == sorted(seen)  # some are lost with the hub, the others keep their order
            assert receiver.request(Beat(), timeout_s=WAIT_S) == Done()
            assert receiver.counters.reconnects == 1
    finally:
        hub.kill()


def quiet(inbox: Inbox, seen: list[int]) -> bool:
    """Note the number of the next piece; return whether none came for a while."""
    try:
        arrival = inbox.receive(deadline=time.monotonic() + 0.3)
    except DeadlineExceeded:
        return True
    note(arrival, seen)
    return False


def note(arrival: object, seen: list[int]) -> None:
    if isinstance(arrival, Relayed):
        seen.append(int.from_bytes(arrival.payload[:4], "big"))
