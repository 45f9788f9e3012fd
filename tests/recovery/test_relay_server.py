"""Asks through the hub: bounded, harmless when they are nonsense, and apart from other frames."""

from __future__ import annotations

import pytest

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded
from atoll.net.dispatcher import Inbox, Relayed
from atoll.wire.recovery_messages import (
    ANSWERS,
    ASKS,
    CHUNK,
    OFFER,
    StateAsk,
    pack_ask,
    unpack_answer,
)
from tests.net.small_hub import SmallHub, linked
from tests.patience import PATIENCE_S
from tests.recovery.world import World, wait_until


def soon(seconds: float = 10.0) -> float:
    return RealClock().monotonic() + seconds


def drain(inbox: Inbox) -> list[tuple[int, str]]:
    """Return number and status of all answers that come, until none comes for a moment."""
    found: list[tuple[int, str]] = []
    while True:
        try:
            item = inbox.receive(deadline=soon(0.5))
        except DeadlineExceeded:
            return found
        assert isinstance(item, Relayed)
        answer, _ = unpack_answer(item.payload)
        found.append((answer.number, answer.status))


def test_an_inbox_gets_only_payloads_that_begin_as_it_wants() -> None:
    with SmallHub() as hub, linked(hub, "j/w0", "j/w1") as (sender, receiver):
        everything = receiver.subscribe()
        asks, answers = receiver.subscribe(prefix=ASKS), receiver.subscribe(prefix=ANSWERS)
        for payload in (b"other", ASKS + b"1", ANSWERS + b"2", b"", ASKS[:2]):
            sender.relay("j/w1", (payload, b""), deadline=soon())
        seen = [bytes(everything.receive(deadline=soon()).payload) for _ in range(5)]  # type: ignore[union-attr]
        assert seen == [b"other", ASKS + b"1", ANSWERS + b"2", b"", ASKS[:2]]
        for inbox, expected in ((asks, ASKS + b"1"), (answers, ANSWERS + b"2")):
            item = inbox.receive_now()
            assert isinstance(item, Relayed)
            assert bytes(item.payload) == expected
            assert inbox.receive_now() is None


def test_nonsense_is_passed_over_and_asks_go_on(world: World) -> None:
    world.donor("w0", direct=False, numel=10)
    link = world.link("w1")
    inbox = link.subscribe(prefix=ANSWERS)
    for junk in (b"", b"\xff\xff", b"\xff" * 300, b"\x00\x07garbage"):
        link.relay(f"{world.job}/w0", (ASKS + junk, b""), deadline=soon())
    link.relay(f"{world.job}/w0", pack_ask(StateAsk(9, OFFER, 3)), deadline=soon())
    assert [number for number, _ in drain(inbox)] == [9]
    inbox.close()


def test_a_flood_of_asks_gets_a_bounded_number_of_answers(world: World) -> None:
    world.donor("w0", direct=False, numel=10_000_000)
    link = world.link("w1")
    with link.subscribe(prefix=ANSWERS) as inbox:
        number = iter(range(1, 1000))

        def ready() -> bool:
            ask = pack_ask(StateAsk(next(number), OFFER, 3))
            link.relay(f"{world.job}/w0", ask, deadline=soon())
            return drain(inbox)[-1][1] == "ok"

        wait_until(ready, timeout_s=PATIENCE_S)
        asks = [pack_ask(StateAsk(0, CHUNK, 3, "shared", index, 16)) for index in range(150)]
        link.relay_all(f"{world.job}/w0", asks, deadline=soon())
        relay_server = world.donors["w0"]._relay_server
        assert all(len(sent) <= 16 for sent in list(relay_server._in_flight.values()))
        statuses = drain(inbox)
        assert 16 <= len(statuses) <= 150
        assert {status for _, status in statuses} == {"ok"}
        wait_until(lambda: not relay_server._in_flight)


def test_a_member_of_another_job_reaches_no_donor(world: World) -> None:
    world.donor("w0", direct=False, numel=10)
    with world.stranger() as stranger, stranger.subscribe(prefix=ANSWERS) as inbox:
        stranger.relay(f"{world.job}/w0", pack_ask(StateAsk(1, OFFER, 3)), deadline=soon())
        with pytest.raises(DeadlineExceeded):
            inbox.receive(deadline=soon(0.5))
