"""The donor's own port: strangers get nothing, and take nothing."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from atoll.net.member_tls import MemberKey, server_context
from atoll.recovery import StateServer, http_server
from atoll.recovery.direct_source import DirectSource
from atoll.recovery.http_server import HttpStateServer
from atoll.recovery.source import ConnectionBroken
from atoll.state_lock import StateLock
from atoll.wire.recovery_messages import CHUNK, OFFER, OK, StateAnswer, StateAsk
from tests.group.man_in_the_middle import Middle
from tests.patience import PATIENCE_S
from tests.recovery.world import LOCAL, Model, wait_until
from tests.thread_limit import no_more_threads

BODY = bytes(range(256)) * 1024


def answer(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
    body = memoryview(BODY) if ask.kind == CHUNK else memoryview(b"")
    return StateAnswer(ask.number, OK, ask.round, key="k"), body


@pytest.fixture
def opened() -> Iterator[HttpStateServer]:
    opened = HttpStateServer(answer, address=LOCAL, keys=("right", ""), max_connections=3)
    yield opened
    opened.close()


def get(
    opened: HttpStateServer, path: str, *, key: str | None = "right", method: str = "GET"
) -> int:
    connection = http.client.HTTPConnection(LOCAL, opened.port, timeout=PATIENCE_S)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            assert b"\x00\x01\x02" not in body
        return response.status
    finally:
        connection.close()


def test_with_the_key_the_bytes_come_on_one_connection(opened: HttpStateServer) -> None:
    source = DirectSource(f"{LOCAL}:{opened.port}", key="right")
    for _ in range(3):
        _, body = source.ask(StateAsk(0, CHUNK, 3, "shared", 0, 1))
        assert bytes(body) == BODY
        given, body = source.ask(StateAsk(0, OFFER, 3))
        assert (given.key, len(body)) == ("k", 0)
    source.release()


@pytest.mark.parametrize("key", ["wrong", "", "righ", "rightt", None])
def test_without_the_key_nothing_comes(opened: HttpStateServer, key: str | None) -> None:
    assert get(opened, "/chunk/3/shared/0/1", key=key) == 401
    if key is not None:
        source = DirectSource(f"{LOCAL}:{opened.port}", key=key)
        with pytest.raises(ConnectionBroken, match="status 401"):
            source.ask(StateAsk(0, CHUNK, 3, "shared", 0, 1))
        source.release()


@pytest.mark.parametrize("path", ["/", "/chunk", "/chunk/x/shared/0/1", "/a/b/c/d/e/f", "*"])
def test_a_path_that_asks_for_nothing_is_a_bad_request(opened: HttpStateServer, path: str) -> None:
    assert get(opened, path) == 400


def test_other_methods_are_refused(opened: HttpStateServer) -> None:
    assert get(opened, "/chunk/3/shared/0/1", method="DELETE") == 405


def raw(opened: HttpStateServer, data: bytes) -> bytes:
    """Send bytes and return everything until the other side ends it."""
    with socket.create_connection((LOCAL, opened.port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            received = b""
            while more := connection.recv(65_536):
                received += more
            return received
        except ConnectionError:
            return b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000,
        b"\x00" * 100_000,
        b"\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
    ],
    ids=["long head", "zeros", "empty", "no text"],
)
def test_heads_that_are_none_end_the_connection(opened: HttpStateServer, data: bytes) -> None:
    assert raw(opened, data) in (b"", b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")


def test_a_stranger_who_says_nothing_is_cut_off(
    opened: HttpStateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "FIRST_HEAD_S", 0.1)
    assert raw(opened, b"GET /") == b""


def test_only_so_many_connections_are_open_at_a_time(opened: HttpStateServer) -> None:
    first = [socket.create_connection((LOCAL, opened.port), timeout=PATIENCE_S) for _ in range(3)]
    with socket.create_connection((LOCAL, opened.port), timeout=PATIENCE_S) as fourth:
        assert fourth.recv(1) == b""
    first[0].close()

    def served() -> bool:
        try:
            return get(opened, "/chunk/3/shared/0/1") == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_until(served)
    for connection in first[1:]:
        connection.close()


def started_since(before: set[threading.Thread]) -> set[str]:
    """Return the names of new threads; of earlier tests' servers some may be about to end."""
    return {thread.name for thread in threading.enumerate() if thread not in before}


def test_closing_ends_connections_and_threads() -> None:
    before = set(threading.enumerate())
    opened = HttpStateServer(answer, address=LOCAL, keys=("right",))
    connection = socket.create_connection((LOCAL, opened.port), timeout=PATIENCE_S)
    names = {"state-http", "state-http-connection"}
    wait_until(lambda: names <= started_since(before))
    opened.close()
    assert connection.recv(1) == b""
    connection.close()
    wait_until(lambda: not names & started_since(before))
    with pytest.raises(OSError):
        socket.create_connection((LOCAL, opened.port), timeout=1)


def test_closing_ends_a_handshake() -> None:
    before = set(threading.enumerate())
    context = server_context(MemberKey())
    opened = HttpStateServer(answer, address=LOCAL, keys=("right",), tls=context)
    with socket.create_connection((LOCAL, opened.port), timeout=PATIENCE_S) as connection:
        wait_until(lambda: "state-http-connection" in started_since(before))
        opened.close()
        assert connection.recv(1) == b""


def test_a_connection_without_a_thread_takes_no_slot(opened: HttpStateServer) -> None:
    with no_more_threads("state-http-connection"):
        for _ in range(3):
            assert raw(opened, b"") == b""
    assert get(opened, "/chunk/3/shared/0/1") == 200


def test_server_without_a_hub_takes_the_jobs_token() -> None:
    with StateServer(job="j", token="secret", address=LOCAL, link=None) as server:
        server.offer(Model("w0", numel=10), still=StateLock().still)
        (dial,) = server.dial
        source = DirectSource(dial, key="secret", fingerprint=server.fingerprint)
        wait_until(lambda: source.ask(StateAsk(0, OFFER, 3))[0].status == OK)
        assert server.rounds == [3]
        source.release()
        stranger = DirectSource(dial, key="", fingerprint=server.fingerprint)
        with pytest.raises(ConnectionBroken):
            stranger.ask(StateAsk(0, OFFER, 3))
        stranger.release()


def test_a_state_crosses_the_network_encrypted() -> None:
    """One in the middle records all: neither key nor state; another server gets no key."""
    with StateServer(job="j", token="secret", address=LOCAL, link=None) as server:
        server.offer(Model("w0", numel=10_000), still=StateLock().still)
        middle = Middle(server.dial[0])
        source = DirectSource(middle.dial, key="secret", fingerprint=server.fingerprint)
        wait_until(lambda: source.ask(StateAsk(0, OFFER, 3))[0].status == OK)
        image = source.ask(StateAsk(0, OFFER, 3))[0].images[0].name
        _, body = source.ask(StateAsk(0, CHUNK, 3, image, 0, 1))
        piece = bytes(body[20_000:20_064])
        source.release()
        middle.close()
        assert len(middle.received) > 40_000
        assert piece not in middle.received
        assert b"secret" not in middle.received
    with StateServer(job="j", token="secret", address=LOCAL, link=None) as other:
        middle = Middle(other.dial[0])
        with pytest.raises(ConnectionBroken, match="another process answers"):
            DirectSource(middle.dial, key="secret", fingerprint=server.fingerprint)
        middle.close()


def test_without_encryption_a_state_is_served_plainly() -> None:
    with StateServer(job="j", token="t", address=LOCAL, link=None, encrypted=False) as server:
        assert server.fingerprint == ""
        server.offer(Model("w0", numel=10), still=StateLock().still)
        source = DirectSource(server.dial[0], key="t")
        wait_until(lambda: source.ask(StateAsk(0, OFFER, 3))[0].status == OK)
        source.release()


def test_a_server_on_an_address_of_another_machine_has_no_port() -> None:
    with StateServer(job="j", token="t", address="203.0.113.7", link=None) as server:
        assert server.dial == []


def test_a_server_without_an_address_has_no_port() -> None:
    with StateServer(job="j", token="t", address="", link=None) as server:
        assert server.dial == []
        server.close()
