"""Connections that break, fall silent or are refused."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from atoll.clock import VirtualClock
from atoll.errors import AtollError, AuthError, HubUnreachable, VersionMismatch
from atoll.net.handshake import Replaced
from atoll.net.transport import ConnectionLost
from atoll.wire.frames import HEADER, MAGIC, Kind, decode, encode, encode_relay
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Beat, Failure, Hello, Roster, RosterReply, Welcome, unpack
from tests.net.scripted import WAIT_S, ScriptedHub, run

HUB_RESTARTS = 1012


def test_interrupted_request_is_resent_under_its_number() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        hub.away = 3
        peer.transport.cut()
        peer = await hub.welcome(resumed=True)
        again, _ = await peer.expect(Roster)
        assert again.id == pending.id
        await peer.answer(again, RosterReply([]))
        assert await asking == RosterReply([])
        assert link.counters.reconnects == 1
        assert hub.dials == 5
        await link.close()

    run(scenario())


def test_request_waits_for_an_absent_hub() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        await peer.transport.close(HUB_RESTARTS)
        peer = await hub.accept()  # connected, but not welcomed yet
        envelope, _ = await peer.expect(Hello)
        assert not link.connected
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        assert await peer.nothing_more()
        await peer.answer(envelope, Welcome("v", 1000, 60.0, False))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        await asking
        await link.close()

    run(scenario())


def test_a_refused_token_ends_the_start_at_once() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link = hub.link()
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S, patient=True))
        peer = await hub.accept()
        envelope, _ = await peer.expect(Hello)
        await peer.answer(envelope, Failure(AuthError("this token is unknown").to_dict()))
        with pytest.raises(AuthError, match="token is unknown"):
            await starting
        assert hub.dials == 1

    run(scenario())


def test_a_token_refused_on_reconnect_ends_every_call() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked(window_bytes=100)
        failures: list[AtollError] = []
        link.on_failure(failures.append)
        deadline = asyncio.get_running_loop().time() + WAIT_S
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        relaying = asyncio.create_task(
            link.relay_all("job/r", [(b"", bytes(60)), (b"", bytes(60))], deadline=deadline)
        )
        await peer.expect(Roster)
        peer.transport.cut()
        peer = await hub.accept()
        envelope, _ = await peer.expect(Hello)
        await peer.answer(envelope, Failure(AuthError("expired").to_dict()))
        for waiting in (asking, relaying):
            with pytest.raises(AuthError, match="expired"):
                await waiting
        with pytest.raises(AuthError, match="expired"):
            await link.request(Roster(), timeout_s=WAIT_S)
        with pytest.raises(AuthError, match="expired"):
            await link.notify(Beat())
        with pytest.raises(AuthError, match="expired"):
            await link.relay("job/r", (b"", b""), deadline=deadline)
        assert await link.wait_failed() is link.failed
        assert failures == [link.failed]
        assert hub.dials == 2
        await link.close()

    run(scenario())


@pytest.mark.parametrize("in_words", [True, False])
def test_another_version_of_the_protocol_is_final(in_words: bool) -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        peer.transport.cut()
        peer = await hub.accept()
        envelope, _ = await peer.expect(Hello)
        if in_words:
            await peer.answer(envelope, Failure(VersionMismatch("another version").to_dict()))
        else:
            await peer.transport.send(HEADER.pack(MAGIC, PROTOCOL + 1, Kind.CONTROL, 0, 0))
        assert isinstance(await link.wait_failed(), VersionMismatch)
        assert hub.dials == 2
        await link.close()

    run(scenario())


def test_replaced_session_does_not_reconnect() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        await peer.transport.close(4000, "another connection took this session over")
        error = await link.wait_failed()
        assert isinstance(error, Replaced)
        assert "job/w0" in str(error)
        assert hub.dials == 1
        await link.close()

    run(scenario())


def test_a_silent_hub_is_left_and_dialled_again() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, _silent = await hub.linked(heartbeat_s=0.01, dead_after_s=0.1)
        returned = asyncio.Event()
        link.on_reconnect(returned.set)
        await hub.welcome()
        async with asyncio.timeout(WAIT_S):
            await returned.wait()
        assert link.counters.reconnects == 1
        await link.close()

    run(scenario())


def test_a_hub_that_answers_heartbeats_is_not_left() -> None:
    async def scenario() -> None:
        hub, clock = ScriptedHub(), VirtualClock()
        link, peer = await hub.linked(heartbeat_s=0.01, dead_after_s=0.1, clock=clock)
        reading = asyncio.create_task(peer.next_frame())  # answers heartbeats for ever
        for _ in range(4):
            clock.advance(0.06)
            heard = link.counters.received_control_bytes
            async with asyncio.timeout(WAIT_S):
                while link.counters.received_control_bytes == heard and hub.dials == 1:
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.1)  # the link looks oftener: timers of one loop come in order
        assert hub.dials == 1
        assert link.connected
        reading.cancel()
        await link.close()

    run(scenario())


def test_heartbeats_survive_a_broken_figure_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        calls = 0

        def stats() -> dict[str, float]:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("no figures today")
            return {"cpu": 0.5}

        link = hub.link(stats=stats)
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S))
        peer = await hub.welcome(heartbeat_s=0.01)
        await starting
        beats = [await peer.transport.receive() for _ in range(2)]
        envelopes = [unpack(decode(beat)) for beat in beats]
        assert [envelope.id for envelope in envelopes] == [2, 3]
        bodies = [envelope.body for envelope in envelopes]
        assert [body.stats for body in bodies if isinstance(body, Beat)] == [{}, {"cpu": 0.5}]
        times = [body.time for body in bodies if isinstance(body, Beat)]
        assert all(abs(told - time.time()) < WAIT_S for told in times)
        await link.close()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "no figures today" in caplog.text


@pytest.mark.parametrize(
    "bytes_of_a_stranger",
    [b"", b"GET / HTTP/1.1", encode(Kind.CONTROL, b"\xff"), encode(Kind.RELAY, b"\xff")],
)
def test_a_malformed_frame_ends_the_connection_not_the_session(bytes_of_a_stranger: bytes) -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        await peer.transport.send(bytes_of_a_stranger)
        peer = await hub.welcome()
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        await asking
        await link.close()

    run(scenario())


def test_damaged_relay_frame_forces_a_resend() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        got: list[bytes] = []
        link.on_relay(lambda source, payload: got.append(bytes(payload)))
        frame = bytearray(encode_relay("job/w0", "job/reducer", b"payload"))
        frame[-1] ^= 1
        await peer.transport.send(frame)
        peer = await hub.welcome()
        await peer.relay("job/reducer", "job/w0", b"payload")
        asking = asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S))
        pending, _ = await peer.expect(Roster)
        await peer.answer(pending, RosterReply([]))
        await asking
        assert got == [b"payload"]
        await link.close()

    run(scenario())


def test_only_a_patient_start_survives_a_refusal() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        hub.away = 4
        with pytest.raises(HubUnreachable, match="nobody answers"):
            await hub.link().start(timeout_s=WAIT_S)
        assert hub.dials == 1
        link = hub.link()
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S, patient=True))
        await hub.welcome()
        await starting
        assert hub.dials == 5
        await link.close()
        hub.away = 10**9
        with pytest.raises(HubUnreachable, match="nobody answers"):
            await hub.link().start(timeout_s=0.05, patient=True)

    run(scenario())


def test_close_during_a_resume_closes_the_connection() -> None:
    async def scenario() -> None:
        hub = ScriptedHub()
        link, peer = await hub.linked()
        asking = [asyncio.create_task(link.request(Roster(), timeout_s=WAIT_S)) for _ in range(80)]
        for _ in asking:
            await peer.expect(Roster)
        peer.transport.cut()
        peer = await hub.welcome(resumed=True)  # it reads no more, so the resume waits
        while link.counters.reconnects == 0:
            await asyncio.sleep(0)
        await link.close()
        with pytest.raises(ConnectionLost):
            await peer.tell(Beat())
        await asyncio.gather(*asking, return_exceptions=True)

    run(scenario())
