from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from atoll.clock import VirtualClock
from atoll.hub.app import HubOptions
from atoll.hub.security.auth import Identity
from atoll.hub.server import HubServer
from atoll.wire.frames import HEADER, MAGIC, Kind, decode, encode
from atoll.wire.limits import MAX_FRAME_BYTES, MAX_RELAY_BYTES, PROTOCOL, WINDOW_BYTES
from atoll.wire.messages import (
    Beat,
    Done,
    Failure,
    Hello,
    QueueClaim,
    QueueItems,
    QueuePut,
    QueuePutDone,
    Register,
    RoundPlan,
    Welcome,
    pack,
    unpack,
)
from tests.hub.peer import WAIT_S, Peer, open_socket
from tests.patience import PATIENCE_S, PROMPT_S
from tests.tiers import examples

SILENT_S = PATIENCE_S
"""What the hub's own clock has to show before somebody is dead: a busy test is never so silent."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder: Path = tmp_path_factory.mktemp("hub")
    options = HubOptions(
        data=folder / "data",
        jobs=folder / "runs",
        reducers=False,
        hello_timeout_s=PATIENCE_S,
        reconnect_grace_s=0.5,
        dead_after_s=SILENT_S,
    )
    with HubServer(options) as server:
        yield server


def until_lost(hub: HubServer, address: str) -> None:
    """Wait until the hub has lost a session."""
    assert hub.hub is not None
    began = time.monotonic()
    while hub.hub.sessions.get(address) is not None:
        assert time.monotonic() - began < WAIT_S
        time.sleep(0.02)


def read_on(peer: Peer) -> None:
    while True:
        peer.read(time.monotonic() + WAIT_S)


def receive_on(raw: ClientConnection) -> None:
    while True:
        raw.recv(timeout=WAIT_S)


def closing(peer: Peer) -> tuple[int, list[Failure]]:
    """Read until the hub closes; return the code and the failures it sent before."""
    with pytest.raises(ConnectionClosed) as caught:
        read_on(peer)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, [n for n in peer.notices if isinstance(n, Failure)]


def test_hello_is_welcomed_and_a_request_is_answered(hub: HubServer) -> None:
    with Peer(hub, "j/w0") as peer:
        assert isinstance(peer.welcome, Welcome)
        assert peer.welcome.window_bytes == WINDOW_BYTES
        assert not peer.welcome.resumed
        answer = peer.request(QueuePut("j/q", "a", b"x"))
        assert isinstance(answer, QueuePutDone)


def test_a_wrong_frame_behind_hello_leaves_no_traceback(
    hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Else anybody with a token can fill the hub's log."""
    caplog.set_level(logging.ERROR, logger="uvicorn.error")
    with open_socket(hub) as raw:
        hello = Hello(PROTOCOL, "test", "j/gone", hub.operator_token, "i1")
        raw.protocol.send_binary(pack(hello, id=1))
        unmasked = b"\x82\x05wrong"
        raw.socket.sendall(b"".join([*raw.protocol.data_to_send(), unmasked]))
        with pytest.raises(ConnectionClosed):
            receive_on(raw)
    until_lost(hub, "j/gone")
    assert [one.getMessage() for one in caplog.records if one.name == "uvicorn.error"] == []


def test_reconnect_keeps_queued_messages(tmp_path: Path) -> None:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False, reconnect_grace_s=WAIT_S
    )
    with HubServer(options) as hub:
        assert hub.hub is not None
        first = Peer(hub, "j/back", incarnation="one")
        first.cut()
        session = hub.hub.sessions.get("j/back")
        assert session is not None
        while session.connected:
            time.sleep(0.01)
        session.notify(Done())
        with Peer(hub, "j/back", incarnation="one") as again:
            assert isinstance(again.welcome, Welcome)
            assert again.welcome.resumed
            again.notice(Done)


def test_new_incarnation_replaces_the_old_process(hub: HubServer) -> None:
    with Peer(hub, "j/twice") as old, Peer(hub, "j/twice", incarnation="two") as new:
        assert isinstance(new.welcome, Welcome)
        assert not new.welcome.resumed
        assert closing(old)[0] == 4000
        assert isinstance(new.request(Beat()), Done)


def test_second_connection_replaces_the_first(hub: HubServer) -> None:
    with Peer(hub, "j/over") as first, Peer(hub, "j/over") as second:
        assert closing(first)[0] == 4000
        assert isinstance(second.request(Beat()), Done)


def test_a_token_revoked_during_the_wait_opens_no_session(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever connects ever again waits; to be evicted meanwhile ends it."""
    assert hub.hub is not None
    auth = hub.hub.stores.auth
    token = hub.call(auth.issue_job_token("j", member="w7"))
    revoked: list[asyncio.Future[None]] = []

    def pause(identity: Identity, cost: float) -> float:
        revoked.append(asyncio.ensure_future(auth.revoke_member("j", "w7")))
        return 0.01  # the first thing that happens meanwhile

    monkeypatch.setattr(hub.hub.sessions, "pause_of", pause)
    refused = Peer(hub, "j/w7", token=token)
    assert isinstance(refused.welcome, Failure)
    hub.call(ended(revoked[0]), timeout_s=WAIT_S)
    assert hub.hub.sessions.get("j/w7") is None
    refused.close()


async def ended(task: asyncio.Future[None]) -> None:
    """Wait for a task of the hub's loop."""
    await task


def test_session_is_lost_after_the_grace(hub: HubServer) -> None:
    peer = Peer(hub, "j/gone")
    began = time.monotonic()
    peer.cut()
    until_lost(hub, "j/gone")
    assert 0.5 < time.monotonic() - began < PROMPT_S


def test_silence_is_death_though_the_socket_is_open(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    sessions, clock = hub.hub.sessions, VirtualClock(time.monotonic())
    monkeypatch.setattr(sessions, "_clock", clock)

    async def look() -> None:
        """Look as the hub does every now and then; after a leap of the clock once is no time."""
        for _ in range(2):
            sessions.sweep()

    with Peer(hub, "j/mute") as mute, Peer(hub, "j/lively") as lively:
        mute.mute()
        assert isinstance(mute.request(Beat()), Done)
        clock.advance(0.6 * SILENT_S)
        hub.call(look())
        assert sessions.get("j/mute") is not None
        assert isinstance(lively.request(Beat({"cpu": 0.5})), Done)
        clock.advance(0.6 * SILENT_S)
        until_lost(hub, "j/mute")
        hub.call(look())
        assert sessions.get("j/lively") is not None
        assert isinstance(lively.request(Beat()), Done)


def test_no_hello_in_time_closes(tmp_path: Path) -> None:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False, hello_timeout_s=0.1
    )
    with HubServer(options) as hub:
        with open_socket(hub) as raw, pytest.raises(ConnectionClosed) as caught:
            receive_on(raw)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008


def refusal(hub: HubServer, hello: Hello) -> dict[str, str]:
    with open_socket(hub) as raw:
        raw.send(pack(hello, id=7))
        message = raw.recv(timeout=WAIT_S, decode=False)
        envelope = unpack(decode(message))
        assert (envelope.id, envelope.reply) == (7, True)
        assert isinstance(envelope.body, Failure)
        with pytest.raises(ConnectionClosed) as caught:
            raw.recv(timeout=WAIT_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
        return envelope.body.error


def test_other_protocol_version_is_refused_with_both_versions(hub: HubServer) -> None:
    error = refusal(hub, Hello(PROTOCOL + 1, "9.9", "j/w0", hub.operator_token, "i"))
    assert error["kind"] == "VersionMismatch"
    assert f"version {PROTOCOL + 1}" in error["given"]
    assert f"version {PROTOCOL}" in error["expected"]


def test_wrong_token_is_refused(hub: HubServer) -> None:
    assert refusal(hub, Hello(PROTOCOL, "t", "j/w0", "wrong", "i"))["kind"] == "AuthError"


def test_job_token_opens_sessions_of_its_job_only(hub: HubServer) -> None:
    assert hub.hub is not None
    token = hub.call(hub.hub.stores.auth.issue_job_token("mine"))
    with Peer(hub, "mine/w0", token=token) as peer:
        assert isinstance(peer.welcome, Welcome)
    assert refusal(hub, Hello(PROTOCOL, "t", "other/w0", token, "i"))["kind"] == "AuthError"
    assert refusal(hub, Hello(PROTOCOL, "t", "node", token, "i"))["kind"] == "AuthError"


def test_job_token_uses_queues_of_its_job_only(hub: HubServer) -> None:
    assert hub.hub is not None
    token = hub.call(hub.hub.stores.auth.issue_job_token("mine"))
    with Peer(hub, "mine/w0", token=token) as peer:
        assert isinstance(peer.request(QueuePut("mine/q", "k", b"")), QueuePutDone)
        answer = peer.request(QueuePut("node/box", "k", b""))
        assert isinstance(answer, Failure)
        assert answer.error["kind"] == "AuthError"


def test_request_that_waits_does_not_delay_others(hub: HubServer) -> None:
    with Peer(hub, "j/waits") as peer:
        slow = peer.ask(QueueClaim("j/empty", lease_s=WAIT_S, wait_s=WAIT_S))
        assert isinstance(peer.request(QueuePut("j/other", "k", b"")), QueuePutDone)
        assert slow not in peer.answers
        assert isinstance(peer.request(QueuePut("j/empty", "k", b"")), QueuePutDone)
        found = peer.answer(slow)
        assert isinstance(found, QueueItems)
        assert [item.key for item in found.items] == ["k"]


def test_request_sent_twice_is_answered_once(hub: HubServer) -> None:
    with Peer(hub, "j/twin") as peer:
        frame = pack(QueueClaim("j/none", lease_s=5, wait_s=0.3), id=55)
        peer.socket.send(frame)
        peer.socket.send(frame)
        assert peer.answer(55) == QueueItems([])
        with pytest.raises(TimeoutError):
            peer.answer(55, timeout_s=0.3)


def test_error_of_a_handler_is_answered_and_the_session_goes_on(hub: HubServer) -> None:
    with Peer(hub, "nosuch/w0") as peer:
        answer = peer.request(Register())
        assert isinstance(answer, Failure)
        assert "no such job" in answer.error["what"]
        assert isinstance(peer.request(Beat()), Done)


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("short", b"AT", 1002),
        ("magic", b"XX" + bytes(40), 1002),
        ("kind", HEADER.pack(MAGIC, PROTOCOL, 9, 0, 0), 1002),
        ("checksum", HEADER.pack(MAGIC, PROTOCOL, 1, 3, 1) + b"abc", 1002),
        ("body", encode(Kind.CONTROL, b"\xc1\xc1"), 1002),
        ("relay", encode(Kind.RELAY, b"\xffabc"), 1002),
        ("unexpected", pack(RoundPlan("j", 0, 0, [], "relay")), 1002),
        ("huge", HEADER.pack(MAGIC, PROTOCOL, 2, MAX_RELAY_BYTES + 1, 0), 1009),
        ("version", HEADER.pack(MAGIC, PROTOCOL + 1, 1, 0, 0), 1008),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_frame_is_told_and_closed(
    hub: HubServer, name: str, message: bytes, code: int
) -> None:
    with Peer(hub, f"j/bad-{name}") as peer:
        peer.socket.send(message)
        seen, failures = closing(peer)
        assert seen == code
        assert failures


def test_text_message_is_refused(hub: HubServer) -> None:
    with Peer(hub, "j/text") as peer:
        peer.socket.send("hello")
        assert closing(peer)[0] == 1002


def test_oversized_message_closes_only_its_connection(hub: HubServer) -> None:
    with Peer(hub, "j/big") as peer:
        with contextlib.suppress(ConnectionClosed):
            peer.socket.send(bytes(MAX_FRAME_BYTES + 1))
        with pytest.raises(ConnectionClosed) as caught:
            read_on(peer)
        # The kernel may reset a connection on which bytes were still coming in: then no code.
        assert caught.value.rcvd is None or caught.value.rcvd.code == 1009
    assert hub.call(answers(hub))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.booleans(), st.sampled_from([1, 2]))
def test_garbage_never_harms_the_hub(hub: HubServer, data: bytes, framed: bool, kind: int) -> None:
    message = encode(Kind(kind), data) if framed else data
    with open_socket(hub) as raw:
        raw.send(message)
        with pytest.raises(ConnectionClosed):
            receive_on(raw)
    assert hub.hub is not None
    assert hub.call(answers(hub))


async def answers(hub: HubServer) -> bool:
    """Return true: the hub's loop runs."""
    return hub.hub is not None


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.sampled_from([1, 2]))
def test_garbage_in_a_session_ends_at_most_that_session(
    hub: HubServer, data: bytes, kind: int
) -> None:
    peer = Peer(hub, "j/fuzz")
    peer.socket.send(encode(Kind(kind), data))
    closing(peer)
    peer.close()
    with Peer(hub, "j/after") as after:
        assert isinstance(after.request(Beat()), Done)
