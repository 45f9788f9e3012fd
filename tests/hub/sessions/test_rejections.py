"""Bad input on the wire: an event by name, the connection closed, no other session affected."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.hub.sessions.rejections import MAX_AT_ONCE
from atoll.wire.frames import Kind, encode, encode_relay
from atoll.wire.limits import MAX_CONTROL_BYTES, PROTOCOL, WINDOW_BYTES
from atoll.wire.messages import (
    Acked,
    Done,
    Failure,
    Finished,
    Hello,
    LogLines,
    Metrics,
    Point,
    QueueAck,
    QueueClaim,
    QueueItems,
    QueuePut,
    QueuePutDone,
    Register,
    Registered,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
    pack,
)
from tests.hub.membership import launches
from tests.hub.peer import WAIT_S, Peer, chunk, member, node, open_socket, submit


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False)
    with HubServer(options) as server:
        yield server


def rejections(hub: HubServer, job: str) -> list[dict[str, Any]]:
    assert hub.hub is not None
    events = hub.call(hub.hub.stores.events.read(job))
    return [event for event in events if event["kind"] == "refused"]


def one_refusal(hub: HubServer, job: str) -> dict[str, Any]:
    """Wait for the one event about a refusal and return it."""
    deadline = time.monotonic() + WAIT_S
    while not (found := rejections(hub, job)):
        assert time.monotonic() < deadline, "no event was stored"
        time.sleep(0.02)
    assert len(found) == 1
    event: dict[str, Any] = found[0]
    return event


def read_on(read: Callable[[], Any]) -> None:
    while True:
        read()


def closed_with(peer: Peer) -> int:
    with pytest.raises(ConnectionClosed) as caught:
        read_on(lambda: peer.read(time.monotonic() + WAIT_S))
    return caught.value.rcvd.code if caught.value.rcvd is not None else 0


def broken(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


BAD: dict[str, tuple[Callable[[Peer], Any], int, str]] = {
    "no magic": (lambda p: p.socket.send(b"XX" + pack(Done())[2:]), 1002, "not a frame"),
    "wrong checksum": (lambda p: p.socket.send(broken(pack(Done()))), 1002, "checksum"),
    "cut short": (lambda p: p.socket.send(pack(Done())[:-1]), 1002, "length"),
    "no message": (lambda p: p.socket.send(encode(Kind.CONTROL, b"\xc1")), 1002, "malformed"),
    "not for a hub": (lambda p: p.tell(Verdict(1, 1, True)), 1002, "no such message"),
    "an answer to nothing": (lambda p: p.socket.send(pack(Done(), id=1, reply=True)), 1002, ""),
    "Hello again": (lambda p: p.tell(Hello(PROTOCOL, "", p.session, "", "")), 1002, "no such"),
    "text": (lambda p: p.socket.send("hello"), 1002, "text"),
    "control frame too large": (
        lambda p: p.socket.send(encode_unchecked(MAX_CONTROL_BYTES + 1)), 1009, "large",
    ),
    "forged sender": (lambda p: p.relay("j/w1", chunk(8), source="j/w9"), 1008, "sender"),
    "more than its window": (
        lambda p: [
            p.relay(p.session.replace("w0", "w1"), chunk(2**18))
            for _ in range(WINDOW_BYTES // 2**18 + 8)
        ], 1008, "window",
    ),
    "relay frame without addresses": (
        lambda p: p.socket.send(encode(Kind.RELAY, b"\xff\xff")), 1002, "",
    ),
}  # fmt: skip


def encode_unchecked(nbytes: int) -> bytes:
    """Return a control frame whose header says the truth about a body that is too large."""
    import zlib

    body = bytes(nbytes)
    start = pack(Done())[:4]
    return start + nbytes.to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("name", sorted(BAD))
def test_breach_is_told_by_name_and_closes_that_connection_alone(hub: HubServer, name: str) -> None:
    send, code, word = BAD[name]
    with node(hub, "n") as machine:
        job = submit(hub, nodes=2, route="direct")
        orders = launches(machine, 2)
        reader = Peer(hub, f"{job}/w1", token=orders["w1"].token, receive_buffer_bytes=2**16)
        with member(hub, orders["w0"]) as bad, reader as good:
            with contextlib.suppress(ConnectionClosed):
                send(bad)
            assert closed_with(bad) in (code, 0)  # 0: the kernel had to reset the connection
            event = one_refusal(hub, job)
            assert event["member"] == "w0"
            assert word in (event["text"] + str(event["fields"])).lower()
            assert event["fields"]["kind"] in ("WireError", "FrameTooLarge")
            assert isinstance(good.request(Register()), Registered)
            with member(hub, orders["w0"]) as back:
                assert isinstance(back.request(Register()), Registered)


def refused_hello(hub: HubServer, hello: Hello) -> dict[str, str]:
    with open_socket(hub) as raw:
        raw.send(pack(hello, id=1))
        with pytest.raises(ConnectionClosed) as caught:
            read_on(lambda: raw.recv(timeout=WAIT_S))
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
    return dict(one_refusal(hub, "")["fields"])


def test_token_of_another_job_is_refused_harmlessly(hub: HubServer) -> None:
    with node(hub, "n", slots=2) as machine:
        mine = submit(hub, nodes=1, name="mine")
        first = launches(machine, 1)["w0"]
        submit(hub, nodes=1, name="other")
        second = launches(machine, 1)["w0"]
        assert first.job == mine != second.job
        with member(hub, first) as good:
            hello = Hello(PROTOCOL, "t", f"{mine}/w0", second.token, "thief")
            fields = refused_hello(hub, hello)
            assert fields["kind"] == "AuthError"
            assert f"{mine}/w0" in fields["given"]
            assert isinstance(good.request(Register()), Registered)
            assert not rejections(hub, mine), "a stranger writes nothing into a job's events"


def test_member_cannot_speak_as_another_member(hub: HubServer) -> None:
    with node(hub, "n") as machine:
        job = submit(hub, nodes=2, route="direct")
        orders = launches(machine, 2)
        hello = Hello(PROTOCOL, "t", f"{job}/w1", orders["w0"].token, "x")
        assert refused_hello(hub, hello)["kind"] == "AuthError"


def test_process_of_an_older_launch_is_turned_away_for_good(hub: HubServer) -> None:
    assert hub.hub is not None
    auth = hub.hub.stores.auth
    with node(hub, "n") as machine:
        job = submit(hub, nodes=1)
        old = launches(machine, 1)["w0"]
        with member(hub, old, incarnation="old") as frozen:
            frozen.cut()
        token = hub.call(auth.issue_job_token(job, member="w0", attempt=old.attempt + 1))
        with Peer(hub, f"{job}/w0", token=token, incarnation="new") as newer:
            fields = refused_hello(hub, Hello(PROTOCOL, "t", f"{job}/w0", old.token, "old"))
            assert "newer process" in fields["what"]
            assert isinstance(newer.request(Register()), Registered)


def test_many_refusals_are_few_events(hub: HubServer) -> None:
    for number in range(3 * MAX_AT_ONCE):
        with open_socket(hub) as raw:
            raw.send(pack(Hello(PROTOCOL, "t", f"s{number}", "", "i"), id=1))
            with contextlib.suppress(ConnectionClosed):
                read_on(lambda raw=raw: raw.recv(timeout=WAIT_S))  # type: ignore[misc]
    assert hub.hub is not None
    deadline = time.monotonic() + WAIT_S
    while hub.hub.rejections.count < 3 * MAX_AT_ONCE:
        assert time.monotonic() < deadline
    assert 0 < len(rejections(hub, "")) <= 2 * MAX_AT_ONCE


# ------------------------------------------------------------- twice, and in the wrong order


def test_repeated_request_has_one_effect_and_answer(hub: HubServer) -> None:
    with node(hub, "n") as machine:
        job = submit(hub, nodes=1, route="direct")
        order = launches(machine, 1)["w0"]
        with member(hub, order) as worker:
            queue = f"{job}/q"
            put = QueuePut(queue, "key", b"x")
            answers = [worker.request(put) for _ in range(2)]
            assert [a.duplicate for a in answers if isinstance(a, QueuePutDone)] == [False, True]
            items = worker.request(QueueClaim(queue, 30.0))
            assert isinstance(items, QueueItems)
            ack = QueueAck(queue, items.items[0].lease)
            assert [type(worker.request(ack)) for _ in range(2)] == [Done, Done]
            assert worker.request(QueueClaim(queue, 30.0)) == QueueItems([])
            metrics = Metrics("i1", 1, [Point(0.0, 1, 0, {"loss": 2.0})])
            assert [worker.request(metrics) for _ in range(2)] == [Acked(1), Acked(1)]
            lines = LogLines(job, "w0", 1, ["one"])
            assert [worker.request(lines) for _ in range(2)] == [Acked(1), Acked(1)]
            assert worker.request(Register()) == worker.request(Register())
            plans = [worker.request(RoundJoin(0, "base")) for _ in range(2)]
            assert plans[0] == plans[1]
            assert isinstance(plans[0], RoundPlan)
            vote = RoundVote(0, plans[0].epoch, True, "d", ["w0"])
            verdicts = [worker.request(vote) for _ in range(2)]
            assert verdicts[0] == verdicts[1]
            last = Finished(ok=True, result={"step": 1})
            assert [type(worker.request(last)) for _ in range(2)] == [Done, Done]
        assert hub.hub is not None
        stores = hub.hub.stores
        assert stores.jobs.get(job).committed_round == 1
        points = hub.call(stores.metrics.read(job))
        assert len(points) == 1
        assert len(hub.call(stores.logs.read(job))) == 1


def test_requests_out_of_order_are_refused_with_a_reason(
    hub: HubServer,
) -> None:
    with node(hub, "n") as machine:
        job = submit(hub, nodes=1, route="direct")
        order = launches(machine, 1)["w0"]
        with member(hub, order) as worker:
            early = worker.request(RoundVote(0, 1, True, "d", ["w0"]))
            assert isinstance(early, Failure)
            assert early.error["kind"] == "EpochChanged"
            worker.request(Register())
            plan = worker.request(RoundJoin(0, "base"))
            assert isinstance(plan, RoundPlan)
            vote = RoundVote(0, plan.epoch, True, "d", ["w0"])
            assert isinstance(worker.request(vote), Verdict)
            late = worker.request(RoundJoin(0, "base"))
            assert isinstance(late, Failure)
            assert late.error["kind"] == "LeftBehind"
            assert worker.request(LogLines(job, "w0", 3, ["three"])) == Acked(3)
            assert worker.request(LogLines(job, "w0", 1, ["one", "two"])) == Acked(3)
            following = worker.request(RoundJoin(1, "next"))
            assert isinstance(following, RoundPlan)
            assert following.epoch > plan.epoch


def test_relay_to_another_job_reaches_nobody(hub: HubServer) -> None:
    with node(hub, "n", slots=2) as machine:
        submit(hub, nodes=1, name="one")
        first = launches(machine, 1)["w0"]
        submit(hub, nodes=1, name="two")
        second = launches(machine, 1)["w0"]
        with member(hub, first) as sender, member(hub, second) as other:
            target = f"{second.job}/w0"
            sender.socket.send(encode_relay(target, sender.session, chunk(8)))
            assert isinstance(other.request(Register()), Registered)
            assert not other.relayed
