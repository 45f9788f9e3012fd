"""A hub whose every word a test decides, at the other end of an in-memory connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from atoll.clock import Clock
from atoll.errors import HubUnreachable
from atoll.net.handshake import make_hello
from atoll.net.in_memory import MemoryTransport, pair
from atoll.net.link import Link
from atoll.net.transport import Transport
from atoll.wire.frames import Kind, Relay, decode, decode_relay, encode_relay
from atoll.wire.messages import Beat, Done, Envelope, Hello, Message, Welcome, pack, unpack
from tests.patience import PATIENCE_S

T = TypeVar("T")
M = TypeVar("M", bound=Message)

WAIT_S = PATIENCE_S


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine to its end, but not for ever."""
    return asyncio.run(asyncio.wait_for(coro, 3 * WAIT_S))


def at_once() -> Iterator[float]:
    """Yield no wait at all between attempts."""
    return itertools.repeat(0.0)


class Peer:
    """The hub's end of one connection."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport

    async def next_frame(self) -> Envelope | Relay:
        """Return what the link sent next; heartbeats are answered and skipped."""
        while True:
            async with asyncio.timeout(WAIT_S):
                frame = decode(await self.transport.receive())
            if frame.kind is Kind.RELAY:
                return decode_relay(frame)
            envelope = unpack(frame)
            if not isinstance(envelope.body, Beat):
                return envelope
            await self.answer(envelope, Done())

    async def expect(self, kind: type[M]) -> tuple[Envelope, M]:
        """Return the next frame, which must be a message of this kind."""
        envelope = await self.next_frame()
        assert isinstance(envelope, Envelope)
        assert isinstance(envelope.body, kind)
        return envelope, envelope.body

    async def expect_relay(self) -> Relay:
        """Return the next frame, which must be a relayed one."""
        relay = await self.next_frame()
        assert isinstance(relay, Relay)
        return relay

    async def answer(self, envelope: Envelope, body: Message) -> None:
        """Answer a request."""
        await self.transport.send(pack(body, id=envelope.id, reply=True))

    async def tell(self, body: Message) -> None:
        """Send a notice."""
        await self.transport.send(pack(body))

    async def relay(self, source: str, to: str, payload: bytes) -> None:
        """Send a payload as if another session had relayed it."""
        await self.transport.send(encode_relay(to, source, payload))

    async def nothing_more(self) -> bool:
        """Return whether the link has sent nothing that was not read, now that all have run."""
        for _ in range(20):
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(0.02):
                await self.transport.receive()
        except TimeoutError:
            return True
        return False


class ScriptedHub:
    """What links dial in a test. Each dial makes a pair; the test takes the other end."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Peer] = asyncio.Queue()
        self.away = 0
        """How many further dials fail."""
        self.dials = 0

    async def dial(self) -> Transport:
        """Open a connection, or fail as nobody answers."""
        self.dials += 1
        if self.away > 0:
            self.away -= 1
            raise HubUnreachable("nobody answers", given="a test")
        ours, theirs = pair(capacity=64)
        self._waiting.put_nowait(Peer(theirs))
        return ours

    async def accept(self) -> Peer:
        """Return the hub's end of the next connection."""
        async with asyncio.timeout(WAIT_S):
            return await self._waiting.get()

    async def welcome(
        self, *, window_bytes: int = 1000, heartbeat_s: float = 60.0, resumed: bool = False
    ) -> Peer:
        """Accept the next connection, read its Hello and welcome it."""
        peer = await self.accept()
        envelope, _ = await peer.expect(Hello)
        await peer.answer(envelope, Welcome("test", window_bytes, heartbeat_s, resumed))
        return peer

    def link(
        self,
        *,
        stats: Callable[[], dict[str, float]] | None = None,
        dead_after_s: float = 60.0,
        clock: Clock | None = None,
    ) -> Link:
        """Return a link to this hub that tries again at once; not started.

        With a virtual clock no hub is silent because the machine stalled.
        """
        hello = make_hello("job/w0", "secret", incarnation="one")
        return Link(
            self.dial, hello, clock=clock, stats=stats, retry=at_once, dead_after_s=dead_after_s
        )

    async def linked(
        self,
        *,
        window_bytes: int = 1000,
        heartbeat_s: float = 60.0,
        dead_after_s: float = 60.0,
        clock: Clock | None = None,
    ) -> tuple[Link, Peer]:
        """Return a started link and the hub's end of its first connection."""
        link = self.link(dead_after_s=dead_after_s, clock=clock)
        starting = asyncio.create_task(link.start(timeout_s=WAIT_S))
        peer = await self.welcome(window_bytes=window_bytes, heartbeat_s=heartbeat_s)
        await starting
        return link, peer
