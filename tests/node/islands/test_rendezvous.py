"""Rendezvous of islands: who gets in, who does not, what is waited for; real sockets and hub."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AuthError, JobError, WireError
from atoll.group.routes.rendezvous_store import split_host_port
from atoll.net.member_tls import MemberTls, readable
from atoll.node.islands import rendezvous_client, supervisor_link
from atoll.node.islands.rendezvous_client import RendezvousClient
from atoll.node.islands.rendezvous_server import Joined, Left, Received, RendezvousServer
from atoll.node.islands.supervisor_link import (
    Ended,
    Kill,
    Phases,
    Ready,
    SupervisorLink,
    Word,
    decoded,
    greet,
)
from atoll.node.machine import bandwidth, interfaces
from atoll.wire.messages import RendezvousAddress
from tests.group.man_in_the_middle import Middle
from tests.node.islands.island_machines import RendezvousHub
from tests.node.islands.rendezvous_servers import (
    Opened,
    address_of,
    environment_of,
    hub,
    next_of,
    opened,
    start,
)
from tests.patience import PATIENCE_S

__all__ = ["hub", "opened"]


# ------------------------------------------------------------------------------- getting in


def test_with_the_secret_messages_go_both_ways(opened: Opened) -> None:
    assert opened.server.missing() == ["w1.1", "w1.2"]
    link = opened.come("w1.2")
    follower = next_of(opened.news, Joined).follower
    assert (follower.part, follower.name) == (2, "w1.2 on far")
    assert opened.server.missing() == ["w1.1"]
    received: queue.SimpleQueue[Word | str] = queue.SimpleQueue()
    link.run(received.put, received.put)
    follower.link.send(start())
    follower.link.send(Kill())
    assert [received.get(timeout=PATIENCE_S) for _ in range(2)] == [start(), Kill()]
    ended = Ended(number=0, rank=1, code=3, error={"kind": "JobError", "what": "x"})
    link.send(ended)
    assert next_of(opened.news, Received) == Received(follower, ended)
    link.close()
    assert next_of(opened.news, Left).follower is follower
    assert opened.server.missing() == ["w1.1", "w1.2"]


def test_strangers_get_nothing_and_hold_nobody_up(opened: Opened) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(5):
            silent.enter_context(opened.dial())
        others_come(opened)
        opened.come().close()
        assert next_of(opened.news, Joined).follower.part == 1


def others_come(opened: Opened) -> None:
    """Dial as those do who have no business at a rendezvous server."""
    with opened.dial() as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_closed(garbage)
    with opened.dial() as huge:
        huge.sendall((2**31).to_bytes(4, "big") + b"x")
        assert is_closed(huge)
    with opened.dial() as liar, pytest.raises(AuthError, match="not the first machine"):
        greet(liar, tls=MemberTls(b"guessed", name="w1.1"), leader="w1")
    for name in ("w0.1", "w1.3", "w1", "w1.x"):
        other = opened.come(name)
        with pytest.raises(OSError):
            other.receive()
        other.close()


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side says something or closes; return whether it closed."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_another_process_is_not_taken_for_the_first_machine(opened: Opened) -> None:
    """A follower host with the island's secret listens where the first one would."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            line, _ = listener.accept()
            with line, contextlib.suppress(OSError):
                opened.tls("w1.2").listening(line)

        threading.Thread(target=listen, daemon=True).start()
        with (
            socket.create_connection(listener.getsockname(), PATIENCE_S) as dialled,
            pytest.raises(AuthError, match="not the first machine"),
        ):
            greet(dialled, tls=opened.tls("w1.1"), leader="w1")


def test_one_in_the_middle_reads_and_changes_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_link, "HEARTBEAT_S", 3600.0)  # the next bytes are the follower's
    with opened.dial() as dialled:
        host, port = dialled.getpeername()[:2]
    middle = Middle(f"{host}:{port}")
    try:
        sock = socket.create_connection(split_host_port(middle.dial), PATIENCE_S)
        link = greet(sock, tls=opened.tls("w1.1"), leader="w1")
        link.send(Ready("far"))
        follower = next_of(opened.news, Joined).follower
        link.send(Phases(number=17, ranks={}))
        assert next_of(opened.news, Received).word == Phases(number=17, ranks={})
        assert b"phases" not in middle.received
        assert b"far" not in middle.received
        middle.change_at = len(middle.received)
        link.send(Phases(number=18, ranks={}))
        assert next_of(opened.news, Left).follower is follower
        link.close()
    finally:
        middle.close()


class ClockedSocket(socket.socket):
    """Its time limit counts the seconds of a test, which no busy machine lets pass."""

    def __init__(self, fd: int) -> None:
        super().__init__(fileno=fd)
        self._limit_s: float | None = None
        self._now_s = self._since_s = 0.0
        self._reads = False
        self._changed = threading.Condition()

    def settimeout(self, value: float | None) -> None:
        self._limit_s = value

    def gettimeout(self) -> float | None:
        return self._limit_s

    def recv_into(self, *arguments: Any) -> int:
        with self._changed:
            self._since_s, self._reads = self._now_s, True
            self._changed.notify_all()
        while not readable(self, 0.01):
            if self._limit_s is not None and self._now_s >= self._since_s + self._limit_s:
                raise TimeoutError("timed out")
        with self._changed:
            self._reads = False
        return super().recv_into(*arguments)

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds

    def wait_until_read(self) -> None:
        """Wait until all that has come is read, and more is waited for."""
        with self._changed:
            assert self._changed.wait_for(self._read_all, PATIENCE_S)

    def _read_all(self) -> bool:
        return self._reads and not readable(self, 0.0)


def test_a_silent_side_is_gone_and_one_with_heartbeats_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_link, "HEARTBEAT_S", 0.1)
    limit_s = PATIENCE_S  # of this room, see conftest.py
    line, far = socket.socketpair()
    near = ClockedSocket(line.detach())
    leads = MemberTls(b"k", name="w1")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: SupervisorLink(near, leads.listening(near)))
        follower = greet(far, tls=MemberTls(b"k", name="w1.1"), leader="w1")
        leader = accepted.result(PATIENCE_S)
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    leader.run(lambda word: None, gone.put)
    assert follower.receive() == supervisor_link.Beat(), "by itself"
    for _ in range(5):
        near.pass_time(0.9 * limit_s)
        follower.send(supervisor_link.Beat())
        near.wait_until_read()
    assert gone.empty()
    near.pass_time(1.1 * limit_s)
    assert gone.get(timeout=PATIENCE_S) == f"no message for {limit_s:.0f} s"
    follower.close()


def test_a_restarted_follower_replaces_the_one_before(opened: Opened) -> None:
    first = opened.come()
    former = next_of(opened.news, Joined).follower
    second = opened.come()
    assert next_of(opened.news, Left).follower is former
    assert next_of(opened.news, Joined).follower is opened.server.followers()[1]
    for link in (first, second):
        link.close()


def test_the_address_is_renewed_while_followers_are_missing(
    opened: Opened,
) -> None:
    with opened.hub.as_process("w1.1") as client:
        before = address_of(client.find_rendezvous, opened.hub.job, "w1")
        deadline = time.monotonic() + PATIENCE_S
        while (after := address_of(client.find_rendezvous, opened.hub.job, "w1")) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert after.dial == before.dial
    assert after.secret.partition(".")[0] == before.secret.partition(".")[0]


# ---------------------------------------------------------------------------- no way to it


def test_an_unreachable_first_machine_is_an_error_if_it_lives(
    hub: RendezvousHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_client, "NO_WAY_S", 0.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        dial = f"127.0.0.1:{silent.getsockname()[1]}"
        with hub.as_process("w1") as leader, hub.as_process("w1.1") as client:
            search = RendezvousClient(environment_of(hub, "w1.1", tmp_path), client)
            assert search.look() is None  # there is no rendezvous server
            leader.publish_rendezvous(hub.job, "w1", RendezvousAddress(dial, "key.1"))
            for _ in range(4):
                assert search.look() is None  # its leader may be gone for long
            leader.publish_rendezvous(hub.job, "w1", RendezvousAddress(dial, "key.2"))
            assert search.look() is None
            leader.publish_rendezvous(hub.job, "w1", RendezvousAddress(dial, "key.3"))
            with pytest.raises(
                JobError, match="first machine of this island is unreachable"
            ) as caught:
                search.look()
    text = str(caught.value)
    assert f"(127.0.0.1) dialled {dial} (" in text
    assert "Connection refused" in text
    assert "machines = 1" in text


def test_the_address_of_a_leader_that_is_gone_is_ignored(opened: Opened, tmp_path: Path) -> None:
    environment = environment_of(opened.hub, "w1.1", tmp_path)
    with opened.hub.as_process("w1.1") as client:
        address_of(client.find_rendezvous, opened.hub.job, "w1")
        search = RendezvousClient(environment, client)
        link = search.look()
        assert link is not None
        link.close()
        again = search.look()  # it never started anything: come back
        assert again is not None
        again.close()
        search.pass_by(search.key)
        assert search.look() is None


# ---------------------------------------------------------------------------------- addresses


def test_hub_on_this_machine_is_where_others_find_it_too(
    hub: RendezvousHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "_own_addresses", lambda: ["127.0.0.2", "192.0.2.1"])
    assert interfaces.meeting_addresses(hub.url) == ["127.0.0.1"]
    with socket.socket() as open_hub:
        open_hub.bind(("0.0.0.0", 0))
        open_hub.listen()
        url = f"http://127.0.0.1:{open_hub.getsockname()[1]}"
        assert interfaces.meeting_addresses(url) == ["127.0.0.1", "127.0.0.2"]
    monkeypatch.setattr(bandwidth, "own_address", lambda url: "10.0.0.7" * ("192.0.2.1" in url))
    assert interfaces.meeting_addresses("http://behind-a-proxy:7700") == ["10.0.0.7"]
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_of("192.0.2.7") == ""


def test_a_machine_without_a_network_cannot_be_the_first(
    hub: RendezvousHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "own_address", lambda url: "")
    environment = environment_of(hub, "w1", tmp_path)
    with (
        pytest.raises(JobError, match="is unreachable for the others"),
        RendezvousServer(environment, machines=2, on_news=lambda news: None),
    ):
        pass


def test_a_malformed_message_is_refused() -> None:
    with pytest.raises(WireError):
        decoded(b'{"type": "launch"}')
