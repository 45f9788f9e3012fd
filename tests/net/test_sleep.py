"""A machine that slept: its monotonic clock stood still, the rest of the world went on."""

from __future__ import annotations

import asyncio

from atoll.clock import VirtualClock
from atoll.net.handshake import make_hello
from atoll.net.link import Link
from atoll.wire.messages import Register, Registered
from tests.net.scripted import WAIT_S, ScriptedHub, at_once, run


class Sleeper(VirtualClock):
    """Clocks of a machine that has slept for `slept_s` seconds in all; stalls take no time."""

    slept_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.slept_s


def link_of(hub: ScriptedHub, clock: Sleeper) -> Link:
    hello = make_hello("job/w0", "secret", incarnation="one")
    return Link(hub.dial, hello, clock=clock, retry=at_once, dead_after_s=0.2)


def test_requests_continue_after_the_machine_wakes() -> None:
    async def scenario() -> None:
        hub, clock = ScriptedHub(), Sleeper()
        link = link_of(hub, clock)
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S))
        before = await hub.welcome(heartbeat_s=0.02)
        await starting
        pending = asyncio.create_task(link.request(Register(), timeout_s=WAIT_S))
        envelope, _ = await before.expect(Register)
        clock.slept_s = 3 * 3600.0  # the hub's side still answers: only the clock tells
        answering = asyncio.create_task(before.next_frame())
        after = await hub.welcome(resumed=False)
        again, _ = await after.expect(Register)
        assert again.id == envelope.id
        await after.answer(again, Registered(0, 1, 0, False))
        assert isinstance(await pending, Registered)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await link.close()

    run(scenario())


def test_clock_that_is_set_back_or_by_a_little_changes_nothing() -> None:
    async def scenario() -> None:
        hub, clock = ScriptedHub(), Sleeper()
        link = link_of(hub, clock)
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S))
        peer = await hub.welcome(heartbeat_s=0.02)
        await starting
        for slept_s in (0.0, 2.0, -3600.0):
            clock.slept_s = slept_s
            answering = asyncio.create_task(peer.next_frame())
            await asyncio.sleep(0.06)  # the link looks each 25 ms: timers of one loop come in order
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        assert link.connected
        assert hub.dials == 1
        await link.close()

    run(scenario())
