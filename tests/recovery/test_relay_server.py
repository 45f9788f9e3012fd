"""Asks through the hub: bounded, harmless when they are nonsense, and apart from other frames."""

from __future__ import annotations

import itertools

import pytest

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded
from atoll.net.dispatcher import Arrival, Inbox, Relayed
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


def soon(seconds: float = PATIENCE_S) -> float:
    return RealClock().monotonic() + seconds


def answer_in(item: Arrival) -> tuple[int, str]:
    """Return number and status of an answer."""
    assert isinstance(item, Relayed)
    answer, _ = unpack_answer(item.payload)
    return answer.number, answer.status


def until(inbox: Inbox, number: int) -> list[tuple[int, str]]:
    """Return number and status of all answers that come, to the one with this number."""
    found = [answer_in(inbox.receive(deadline=soon()))]
    while found[-1][0] != number:
        found.append(answer_in(inbox.receive(deadline=soon())))
    return found


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
    for number in (9, 10):
        link.relay(f"{world.job}/w0", pack_ask(StateAsk(number, OFFER, 3)), deadline=soon())
    assert [number for number, _ in until(inbox, 10)] == [9, 10]
    inbox.close()


def test_a_flood_of_asks_gets_a_bounded_number_of_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.donor("w0", direct=False, numel=10_000_000)
    link = world.link("w1")
    with link.subscribe(prefix=ANSWERS) as inbox:
        numbers = itertools.count(1)

        def ask() -> list[tuple[int, str]]:
            number = next(numbers)
            link.relay(f"{world.job}/w0", pack_ask(StateAsk(number, OFFER, 3)), deadline=soon())
            return until(inbox, number)

        wait_until(lambda: ask()[-1][1] == "ok")
        relay_server = world.donors["w0"]._relay_server
        answer_ask, in_flight = relay_server._answer_ask, list[int]()

        def watched(receiver: str, asked: StateAsk) -> None:
            answer_ask(receiver, asked)
            in_flight.append(len(relay_server._in_flight.get(receiver, ())))

        monkeypatch.setattr(relay_server, "_answer_ask", watched)
        asks = [pack_ask(StateAsk(0, CHUNK, 3, "shared", index, 16)) for index in range(150)]
        link.relay_all(f"{world.job}/w0", asks, deadline=soon())
        found: list[tuple[int, str]] = []

        def all_are_sent() -> bool:
            while (item := inbox.receive_now()) is not None:
                found.append(answer_in(item))
            return len(in_flight) == len(asks) and not relay_server._in_flight

        wait_until(all_are_sent)
        assert max(in_flight) <= 16
        found += ask()[:-1]  # its own answer comes after all others
        assert 16 <= len(found) <= 150
        assert set(found) == {(0, "ok")}


def test_a_member_of_another_job_reaches_no_donor(world: World) -> None:
    world.donor("w0", direct=False, numel=10)
    with world.stranger() as stranger, stranger.subscribe(prefix=ANSWERS) as inbox:
        stranger.relay(f"{world.job}/w0", pack_ask(StateAsk(1, OFFER, 3)), deadline=soon())
        with pytest.raises(DeadlineExceeded):
            inbox.receive(deadline=soon(0.5))
