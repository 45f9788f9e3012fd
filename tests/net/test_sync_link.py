from __future__ import annotations

import gc
import threading
import time

import pytest

from atoll.errors import AtollError, AuthError, DeadlineExceeded, HubError, HubUnreachable, PeerLost
from atoll.net.dispatcher import LIMIT_BYTES, MAX_EARLY, Reconnected, Relayed
from atoll.net.handshake import make_hello
from atoll.net.sync_link import connect
from atoll.wire.chunks import ChunkHead, count_pieces, pack_chunk, pieces
from atoll.wire.limits import CHUNK_BYTES, WINDOW_BYTES
from atoll.wire.messages import (
    Done,
    MemberLost,
    QueueClaim,
    Register,
    Roster,
    RosterReply,
    Undeliverable,
)
from tests.net.small_hub import TOKEN, SmallHub, linked
from tests.patience import PATIENCE_S, PROMPT_S

WAIT_S = PATIENCE_S


def soon(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


def test_a_request_is_answered_and_a_failure_raised() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        assert link.request(Roster(), timeout_s=WAIT_S) == RosterReply([])
        with pytest.raises(HubError, match="not today"):
            link.request(Register(), timeout_s=WAIT_S)
        assert link.connected
        assert link.counters.sent_control_bytes > 0


def test_a_request_ends_at_its_deadline() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="QueueClaim"):
            link.request(QueueClaim("q", 1.0), timeout_s=0.1)
        assert time.monotonic() - started < PROMPT_S


def test_a_request_survives_a_hub_that_goes_and_comes_back() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        hub.shut()
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.append(link.request(Roster(), timeout_s=WAIT_S))
        )
        asking.start()
        hub.open()
        asking.join(WAIT_S)
        assert answers == [RosterReply([])]
        assert link.counters.reconnects == 1


def test_a_wrong_token_is_told_at_once_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with SmallHub() as hub, pytest.raises(AuthError, match="token is unknown"):
        connect(hub.url, make_hello("job/w0", "wrong"), patient=True)
    with pytest.raises(HubUnreachable, match="connection refused"):
        connect(hub.url, make_hello("job/w0", TOKEN))
    assert not set(threading.enumerate()) - before


def test_a_packet_crosses_in_views_that_are_never_copied() -> None:
    packet = bytes(range(256)) * (CHUNK_BYTES // 64) + b"tail"
    count = count_pieces(len(packet))
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (sender, receiver):
        inbox = receiver.subscribe(sources=["job/w0"])
        heads = (
            ChunkHead("contribute", 1, 1, index, count, len(packet), "fp32", [1], 1.0)
            for index in range(count)
        )
        parts = (pack_chunk(head, piece) for head, piece in zip(heads, pieces(packet), strict=True))
        sent = sender.relay_all("job/w1", parts, deadline=soon())
        assert sent == sender.counters.sent_relay_bytes > len(packet)
        body = b""
        for _ in range(count):
            arrival = inbox.receive(deadline=soon())
            assert isinstance(arrival, Relayed)
            assert isinstance(arrival.payload.obj, bytes)
            head_bytes = 2 + int.from_bytes(arrival.payload[:2], "big")
            body += arrival.payload[head_bytes:]
        assert body == packet
        assert receiver.counters.received_relay_bytes == sent


def test_inboxes_get_only_what_they_subscribed_to_in_order() -> None:
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1", "job/r") as (w0, w1, receiver):
        from_w0 = receiver.subscribe(sources=["job/w0"])
        everything = receiver.subscribe(notices=(MemberLost, Undeliverable))
        silent = receiver.subscribe(sources=())
        w0.relay("job/r", (b"a", b"1"), deadline=soon())
        assert bytes(_payload(from_w0.receive(deadline=soon()))) == b"a1"
        hub.tell("job/r", MemberLost("job", 1, "w1"))
        hub.tell("job/r", Done())
        w1.relay("job/r", (b"b", b"2"), deadline=soon())
        got = [everything.receive(deadline=soon()) for _ in range(3)]
        assert bytes(_payload(got[0])) == b"a1"
        assert got[1] == MemberLost("job", 1, "w1")
        assert bytes(_payload(got[2])) == b"b2"
        assert from_w0.receive_now() is None
        assert silent.receive_now() is None


def test_the_first_inbox_also_gets_what_came_before_it() -> None:
    with SmallHub() as hub, linked(hub, "job/w0", "job/r") as (w0, receiver):
        hub.tell("job/r", MemberLost("job", 1, "w1"))
        hub.tell("job/r", Done())
        w0.relay("job/r", (b"early", b""), deadline=soon())
        _until(lambda: receiver.counters.received_relay_bytes > 0)
        first = receiver.subscribe(sources=["job/w0"], notices=(MemberLost,))
        second = receiver.subscribe(sources=["job/w0"], notices=(MemberLost,))
        assert first.receive(deadline=soon()) == MemberLost("job", 1, "w1")
        assert bytes(_payload(first.receive(deadline=soon()))) == b"early"
        assert second.receive_now() is None


def test_unread_link_keeps_only_the_newest_notices() -> None:
    with SmallHub() as hub, linked(hub, "job/r") as (link,):
        for epoch in range(MAX_EARLY + 10):
            hub.tell("job/r", MemberLost("job", epoch, "w1"))
        assert link.request(Roster(), timeout_s=WAIT_S) == RosterReply([])
        inbox = link.subscribe(notices=(MemberLost,))
        assert inbox.receive_now() == MemberLost("job", 10, "w1")


def test_an_empty_inbox_ends_its_wait_at_the_deadline() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        inbox = link.subscribe(sources=["job/reducer"])
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="job/reducer"):
            inbox.receive(deadline=soon(0.1))
        assert 0.05 < time.monotonic() - started < PROMPT_S


def test_a_reconnect_is_an_arrival_for_those_who_asked() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        wants, wants_not = link.subscribe(reconnects=True), link.subscribe()
        hub.cut()
        assert wants.receive(deadline=soon()) == Reconnected(1)
        assert wants_not.receive_now() is None


def test_a_link_that_fails_for_good_ends_the_wait_of_its_inboxes() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        inbox = link.subscribe()
        errors: list[AtollError] = []

        def wait() -> None:
            try:
                inbox.receive(deadline=soon())
            except AtollError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        link.close()
        waiting.join(WAIT_S)
        assert [type(error) for error in errors] == [HubError]
        assert "closed" in str(errors[0])
        for call in (
            lambda: link.request(Roster(), timeout_s=1.0),
            lambda: link.notify(Done()),
            lambda: link.relay("job/r", (b"", b""), deadline=soon()),
            lambda: inbox.receive(deadline=soon()),
        ):
            with pytest.raises(HubError, match="closed"):
                call()
        link.close()


def test_a_receiver_that_is_not_there_is_peer_lost_or_a_notice() -> None:
    with SmallHub() as hub, linked(hub, "job/w0") as (link,):
        inbox = link.subscribe(notices=(Undeliverable,))
        parts = [(b"", bytes(CHUNK_BYTES))] * 100
        with pytest.raises(PeerLost, match="job/reducer"):
            link.relay_all("job/reducer", parts, deadline=soon())
        assert inbox.receive(deadline=soon()) == Undeliverable("job/reducer")


def test_unread_payloads_stop_the_sender() -> None:
    packet = 10 * (LIMIT_BYTES + 2 * WINDOW_BYTES) // CHUNK_BYTES
    parts = ((b"", bytes(CHUNK_BYTES)) for _ in range(packet))
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (sender, receiver):
        inbox = receiver.subscribe()
        sending = sender.relay_later("job/w1", parts, deadline=soon())
        _until(lambda: receiver.counters.received_relay_bytes > LIMIT_BYTES)
        stopped = _when_steady(lambda: sender.counters.sent_relay_bytes)
        assert receiver.counters.received_relay_bytes < LIMIT_BYTES + 2 * CHUNK_BYTES
        assert stopped < packet * CHUNK_BYTES // 2
        assert not sending.done()
        for _ in range(packet):
            assert len(_payload(inbox.receive(deadline=soon()))) == CHUNK_BYTES
        assert sending.result(WAIT_S) > packet * CHUNK_BYTES


def test_closing_an_inbox_that_is_full_lets_the_link_read_again() -> None:
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (sender, receiver):
        full = receiver.subscribe()
        parts = ((b"", bytes(CHUNK_BYTES)) for _ in range(4 * LIMIT_BYTES // CHUNK_BYTES))
        sending = sender.relay_later("job/w1", parts, deadline=soon())
        _until(lambda: receiver.counters.received_relay_bytes > LIMIT_BYTES)
        full.close()
        sending.result(WAIT_S)
        with pytest.raises(HubError, match="inbox is closed"):
            full.receive(deadline=soon())


def test_relaying_leaves_the_main_thread_most_of_its_time() -> None:
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (sender, receiver):
        inbox = receiver.subscribe()
        parts = ((b"", bytes(CHUNK_BYTES)) for _ in range(160))
        sending = sender.relay_later("job/w1", parts, deadline=soon())
        turns, held_up_s = 0, 0.0
        gc.collect()
        # In time that this process computes: what holds this thread up is another that does, and
        # not the machine, which may give the whole process no core for seconds.
        began = last = time.process_time()
        while not sending.done():
            now = time.process_time()
            held_up_s += now - last if now - last > 0.1 else 0.0
            last = now
            turns += 1
            while inbox.receive_now() is not None:
                pass
        sending.result()
        assert turns > 100
        assert held_up_s < 0.5 * (last - began)


def _payload(arrival: object) -> memoryview:
    assert isinstance(arrival, Relayed)
    return arrival.payload


def _until(condition: object) -> None:
    """Wait for a condition that another thread brings about."""
    assert callable(condition)
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def _when_steady(value: object) -> int:
    """Return a number when it has not changed for a while."""
    assert callable(value)
    last = value()
    unchanged = 0
    while unchanged < 10:
        time.sleep(0.02)
        now = value()
        unchanged = unchanged + 1 if now == last else 0
        last = now
    return int(last)
