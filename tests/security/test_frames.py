"""Frames that are malformed, cut short, oversize, repeated or of the wrong speaker.

The hub, a program of its own here, refuses them, tells why, and goes on.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.wire.frames import HEADER, decode, encode_relay
from atoll.wire.limits import MAX_FRAME_BYTES, PROTOCOL
from atoll.wire.messages import (
    Beat,
    Done,
    Failure,
    Hello,
    LogLines,
    Message,
    Metrics,
    Point,
    ProcessState,
    QueueClaim,
    QueueItems,
    QueuePut,
    RoundJoin,
    Stop,
    TopicRead,
    Welcome,
    pack,
    unpack,
)
from atoll.wire.states import ProcessPhase
from tests.patience import PATIENCE_S
from tests.security.conftest import INFO, SPEC
from tests.tiers import examples


class Program:
    """A hub as a program, with a node and two jobs."""

    def __init__(self, info: dict[str, str]) -> None:
        self.url, self.port = info["url"], int(info["port"])
        self.client = HubClient(self.url, info["operator_token"])
        self.operator = info["operator_token"]
        joined = self.client.join(parse_ticket(info["ticket"]).secret, name="box", info=INFO)
        self.node = joined.token
        self.job = self.client.submit(SPEC)

    def alive(self) -> None:
        """Assert that it still answers."""
        assert "rss_bytes" in self.client.hub()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("hub")
    command = [sys.executable, "-m", "atoll.hub", "--no-reducers", "--port", "0"]
    command += ["--data", str(folder / "data"), "--jobs", str(folder / "jobs")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        program = Program(json.loads(process.stdout.readline()))
        yield program
        program.client.close()
        assert process.poll() is None
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors


def opened(hub: Program) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{hub.port}/ws", compression=None, ping_interval=None, max_size=None,
        close_timeout=0.2,
    )  # fmt: skip


def greeting(session: str, token: str, *, incarnation: str = "i1") -> bytes:
    info = INFO if "/" not in session else None
    return pack(Hello(PROTOCOL, "test", session, token, incarnation, info), id=1)


def answer(socket: ClientConnection, id: int) -> Message:
    """Return the answer to a request; what else comes is passed over."""
    while True:
        envelope = unpack(decode(socket.recv(timeout=PATIENCE_S, decode=False)))
        if envelope.reply and envelope.id == id:
            return envelope.body


def said_and_closed(socket: ClientConnection) -> list[Message]:
    """Return what the hub says until it closes."""
    found: list[Message] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            found.append(unpack(decode(socket.recv(timeout=PATIENCE_S, decode=False))).body)
    return found


few = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@few
@given(data=st.binary(max_size=400), framed=st.booleans(), kind=st.integers(0, 3))
def test_bytes_that_are_no_hello_are_refused(
    hub: Program, data: bytes, framed: bool, kind: int
) -> None:
    if framed:
        import zlib

        data = HEADER.pack(b"AT", PROTOCOL, kind, len(data), zlib.crc32(data)) + data
    with opened(hub) as socket:
        socket.send(data)
        assert all(isinstance(body, Failure) for body in said_and_closed(socket))
    hub.alive()


@few
@given(cut=st.integers(0, 200), flip=st.integers(0, 200), to=st.integers(0, 255))
def test_a_hello_that_is_cut_short_or_damaged_opens_nothing(
    hub: Program, cut: int, flip: int, to: int
) -> None:
    whole = greeting(f"{hub.job}/w0", "guess")
    damaged = bytearray(whole)
    damaged[flip % len(whole)] = to
    for data in (whole[: cut % len(whole)], bytes(damaged)):
        with opened(hub) as socket:
            socket.send(data)
            assert not any(isinstance(body, Welcome) for body in said_and_closed(socket))
    hub.alive()


@few
@given(data=st.binary(min_size=1, max_size=300))
def test_garbage_in_a_session_ends_that_session_alone(hub: Program, data: bytes) -> None:
    with opened(hub) as bystander, opened(hub) as socket:
        bystander.send(greeting("box", hub.node, incarnation="stays"))
        assert isinstance(answer(bystander, 1), Welcome)
        socket.send(greeting(f"{hub.job}/w9", hub.operator))
        assert isinstance(answer(socket, 1), Welcome)
        socket.send(data)
        said_and_closed(socket)
        bystander.send(pack(QueueClaim("node/box", lease_s=1.0), id=2))
        assert isinstance(answer(bystander, 2), QueueItems)


def test_a_frame_above_the_limit_closes_its_connection_only(hub: Program) -> None:
    with opened(hub) as socket:
        socket.send(greeting(f"{hub.job}/w9", hub.operator))
        assert isinstance(answer(socket, 1), Welcome)
        with contextlib.suppress(ConnectionClosed):
            socket.send(bytes(MAX_FRAME_BYTES + 1))
        said_and_closed(socket)
        # What was not read of it may reset the connection before the code is seen.
        assert socket.close_code in (1009, 1006)
    hub.alive()


def test_replayed_hello_without_token_is_refused(hub: Program) -> None:
    first = greeting("box", hub.node, incarnation="real")
    with opened(hub) as socket:
        socket.send(first)
        assert isinstance(answer(socket, 1), Welcome)
        with opened(hub) as thief:
            thief.send(greeting("box", "", incarnation="real"))
            assert [type(body) for body in said_and_closed(thief)] == [Failure]
        socket.send(pack(QueueClaim("node/box", lease_s=1.0), id=2))
        assert isinstance(answer(socket, 2), QueueItems)


def test_replaced_process_cannot_reuse_its_hello(hub: Program) -> None:
    with opened(hub) as old:
        old.send(greeting("box", hub.node, incarnation="first"))
        assert isinstance(answer(old, 1), Welcome)
        with opened(hub) as new:
            new.send(greeting("box", hub.node, incarnation="second"))
            assert isinstance(answer(new, 1), Welcome)
            with opened(hub) as replayed:
                replayed.send(greeting("box", hub.node, incarnation="first"))
                (refusal,) = said_and_closed(replayed)
                assert isinstance(refusal, Failure)
                assert "newer process" in refusal.error["what"]


def test_a_request_that_is_replayed_does_nothing_twice(hub: Program) -> None:
    put = QueuePut(f"{hub.job}/q", key="once", payload=b"x")
    with opened(hub) as socket:
        socket.send(greeting(f"{hub.job}/w9", hub.operator))
        assert isinstance(answer(socket, 1), Welcome)
        for id in (2, 3):
            socket.send(pack(put, id=id))
            answer(socket, id)
        socket.send(pack(QueueClaim(f"{hub.job}/q", lease_s=30.0, limit=10), id=4))
        items = answer(socket, 4)
        assert isinstance(items, QueueItems)
        assert len(items.items) == 1


@pytest.mark.parametrize(
    "body",
    [
        Metrics("i", 2**63, [Point(1.0, 1, 1, {})]),
        Metrics("i", 1, [Point(float("nan"), 1, 1, {})]),
        Metrics("i", 1, [Point(1.0, 2**63, 1, {})]),
        LogLines("{job}", "w9", 2**63 - 1, ["a", "b"]),
        Beat(time=float("inf")),
        TopicRead("{job}/t", "reader", after=2**63),
    ],
)
def test_numbers_out_of_range_are_the_senders_fault(hub: Program, body: Message) -> None:
    body = in_job(body, hub.job)
    with opened(hub) as socket:
        socket.send(greeting(f"{hub.job}/w9", hub.operator))
        assert isinstance(answer(socket, 1), Welcome)
        socket.send(pack(body, id=2))
        refused = unpack(decode(socket.recv(timeout=PATIENCE_S, decode=False))).body
        assert isinstance(refused, Failure)
        assert refused.error["kind"] == "WireError", refused
    hub.alive()


@pytest.mark.parametrize("numbered", [False, True])
def test_claims_without_end_close_their_own_session(hub: Program, numbered: bool) -> None:
    """As notices they had no number, so none of them counted as open."""
    with opened(hub) as bystander, opened(hub) as socket:
        bystander.send(greeting(f"{hub.job}/w9", hub.operator, incarnation="stays"))
        assert isinstance(answer(bystander, 1), Welcome)
        socket.send(greeting("box", hub.node, incarnation="floods"))
        assert isinstance(answer(socket, 1), Welcome)
        claim = QueueClaim("node/box", lease_s=1.0, wait_s=600.0)
        with contextlib.suppress(ConnectionClosed):
            for id in range(2, 2_002):
                socket.send(pack(claim, id=id if numbered else 0))
        refused = [body for body in said_and_closed(socket) if isinstance(body, Failure)]
        expected = "too many open requests" if numbered else "a request without a number"
        assert [body.error["what"] for body in refused] == [expected]
        bystander.send(pack(QueueClaim(f"{hub.job}/q", lease_s=1.0), id=2))
        assert isinstance(answer(bystander, 2), QueueItems)


@pytest.mark.parametrize(
    "body",
    [
        RoundJoin(0, "base"),
        Stop("{job}", "w0", grace_s=1.0),
        LogLines("{job}", "w7", 1, ["forged"]),
        QueueClaim("{job}/q", lease_s=1.0),
        QueueClaim("node/other", lease_s=1.0),
        QueuePut("node/other", key="k", payload=b"run this"),
        QueuePut("node/box2", key="k", payload=b"run this"),
    ],
)
def test_a_node_cannot_speak_for_jobs_or_other_nodes(hub: Program, body: Message) -> None:
    body = in_job(body, hub.job)
    with opened(hub) as socket:
        socket.send(greeting("box", hub.node, incarnation="wrong-role"))
        assert isinstance(answer(socket, 1), Welcome)
        socket.send(pack(body, id=2))
        refused = answer(socket, 2)
        assert isinstance(refused, Failure), refused
        assert refused.error["kind"] == "AuthError"


def in_job(body: Message, job: str) -> Message:
    for field in ("job", "queue", "topic"):
        if isinstance(value := getattr(body, field, None), str):
            body = type(body)(**{**fields_of(body), field: value.format(job=job)})
    return body


def fields_of(body: Message) -> dict[str, object]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


def test_a_job_cannot_speak_for_another_or_for_a_node(hub: Program) -> None:
    other = hub.client.submit(SPEC)
    with opened(hub) as socket:
        socket.send(greeting("box", hub.node, incarnation="x"))
        assert isinstance(answer(socket, 1), Welcome)
        socket.send(pack(ProcessState(other, "w0", ProcessPhase.EXITED, exit_code=0), id=2))
        assert isinstance(answer(socket, 2), Done), "it is no process that the hub knows of"
    assert hub.client.job(other)["state"] == "waiting"


def test_report_about_a_deleted_job_is_answered_once_and_for_all(hub: Program) -> None:
    with opened(hub) as socket:
        socket.send(greeting("box", hub.node, incarnation="late"))
        assert isinstance(answer(socket, 1), Welcome)
        socket.send(pack(ProcessState("gone", "w0", ProcessPhase.EXITED, exit_code=0), id=2))
        assert isinstance(answer(socket, 2), Done)


def test_relayed_frames_cannot_carry_another_sender(hub: Program) -> None:
    with opened(hub) as victim, opened(hub) as socket:
        victim.send(greeting(f"{hub.job}/w1", hub.operator))
        assert isinstance(answer(victim, 1), Welcome)
        socket.send(greeting(f"{hub.job}/w2", hub.operator))
        assert isinstance(answer(socket, 1), Welcome)
        socket.send(encode_relay(f"{hub.job}/w1", f"{hub.job}/w7", b"forged"))
        assert any(isinstance(body, Failure) for body in said_and_closed(socket))
