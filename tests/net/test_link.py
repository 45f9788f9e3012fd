"""Requests, their answers and their ends."""

from __future__ import annotations

import asyncio

import pytest

from atoll.errors import DeadlineExceeded, HubError, JobError
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import (
    Acked,
    Done,
    Failure,
    Finished,
    Hello,
    Register,
    Registered,
    Roster,
    RosterReply,
    Welcome,
)
from tests.net.scripted import WAIT_S, ScriptedHub, run


def test_start_says_hello_and_returns_the_welcome() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link = hub.link()
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S))
        peer = await hub.accept()
        envelope, hello = await peer.expect(Hello)
        assert envelope.id > 0
        assert (hello.session, hello.token, hello.incarnation) == ("job/w0", "secret", "one")
        assert hello.protocol == PROTOCOL
        await peer.answer(envelope, Welcome("v", 77, 1.0, False))
        assert (await starting).window_bytes == 77
        assert link.connected
        await link.close()
        assert not link.connected

    run(scenario())


def test_requests_are_answered_by_their_number_in_any_order() -> None:
    async def scenario() -> None:
        link, peer = await (hub := ScriptedHub()).linked()
        first = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        asked_first, _ = await peer.expect(Roster)
        second = asyncio.create_task(link.request(Register(), timeout_s=WAIT_S))
        asked_second, _ = await peer.expect(Register)
        await peer.answer(asked_second, Registered(0, 1, 0, False))
        await peer.answer(asked_first, RosterReply([]))
        assert isinstance(await second, Registered)
        assert isinstance(await first, RosterReply)
        await link.close()
        assert hub.dials == 1

    run(scenario())


def test_answers_that_come_twice_or_late_do_no_harm() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        for _ in range(2):
            asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
            pending, _ = await peer.expect(Roster)
            for _ in range(3):
                await peer.answer(pending, RosterReply([]))
            await asking
        with pytest.raises(DeadlineExceeded, match="Roster was not answered in time"):
            await link.request(Roster(), timeout_s=0.01)
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        assert await peer.nothing_more()
        assert link.connected
        await link.close()

    run(scenario())


def test_a_deadline_that_passes_without_a_hub_says_so() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        hub.away = 10**9
        peer.transport.cut()
        with pytest.raises(DeadlineExceeded, match=r"not connected.*check that the hub runs"):
            await link.request(Roster(), timeout_s=0.05)
        await link.close()

    run(scenario())


def test_a_failure_is_raised_as_the_error_it_was() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, Failure(JobError("no such job", given="j").to_dict()))
        with pytest.raises(JobError, match="no such job; given: j"):
            await asking
        assert link.failed is None
        await link.close()

    run(scenario())


def test_close_says_last_words_and_waits_for_their_answer() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        closing = asyncio.create_task(link.close(Finished(True, {"loss": 1.5})))
        pending, finished = await peer.expect(Finished)
        assert finished.result == {"loss": 1.5}
        assert not closing.done()
        await peer.answer(pending, Done())
        await closing
        with pytest.raises(HubError, match="link to the hub is closed"):
            await link.request(Roster(), timeout_s=WAIT_S)
        await link.close()  # again: nothing happens

    run(scenario())


def test_unanswered_close_ends_in_time() -> None:
    async def scenario() -> None:
        link, _ = await ScriptedHub().linked()
        with pytest.raises(DeadlineExceeded, match="Finished was not answered"):
            await link.close(Finished(True), timeout_s=0.02)
        assert not link.connected

    run(scenario())


def test_a_waiting_request_ends_when_the_link_is_closed() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        await peer.expect(Roster)
        await link.close()
        with pytest.raises(HubError, match="closed"):
            await asking

    run(scenario())


def test_a_link_that_was_not_started_says_so() -> None:
    async def scenario() -> None:
        link = ScriptedHub().link()
        with pytest.raises(HubError, match="not started"):
            await link.request(Acked(1), timeout_s=1.0)
        with pytest.raises(HubError, match="not started"):
            await link.wait_failed()

    run(scenario())
