"""One open connection: its reader, its heartbeats, and the check for a silent hub.

A connection ends once; the link decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.net.flow_control import ReadGate
from atoll.net.transport import ConnectionLost, LinkCounters, Transport
from atoll.wire.frames import Frame, Kind, decode, verify
from atoll.wire.messages import Beat, Welcome, pack

logger = logging.getLogger(__name__)

SLEPT_S = 5.0
"""Lead of the wall clock over the monotonic clock from which the machine is assumed to have
slept."""


class Connection:
    """One open connection of a session; `number` counts them from 1."""

    def __init__(
        self,
        transport: Transport,
        *,
        number: int,
        welcome: Welcome,
        clock: Clock,
        counters: LinkCounters,
        ids: Iterator[int],
    ) -> None:
        self._transport = transport
        self._ids = ids
        self._clock = clock
        self._counters = counters
        self._last_seen = clock.monotonic()
        self._beat_id, self._beat_at = 0, 0.0
        """Id and send time of the oldest unanswered heartbeat."""
        self.number = number
        self.welcome = welcome

    async def send(self, frame: bytes, *, kind: Kind) -> None:
        """Send one frame and count it; raises ConnectionLost if the connection ended."""
        await self._transport.send(frame)
        if kind is Kind.RELAY:
            self._counters.sent_relay_bytes += len(frame)
        else:
            self._counters.sent_control_bytes += len(frame)

    async def serve(
        self,
        on_frame: Callable[[Frame], None],
        *,
        read_gate: ReadGate,
        stats: Callable[[], dict[str, float]],
        dead_after_s: float,
    ) -> AtollError:
        """Read frames and send heartbeats until the connection ends; return the reason.

        `on_frame` gets every frame in order, relay frames with verified checksum. A hub that is
        silent for `dead_after_s` ends the connection.
        """
        tasks = [
            asyncio.create_task(self._read(on_frame, read_gate)),
            asyncio.create_task(self._beat(stats)),
            asyncio.create_task(self._watch(read_gate, dead_after_s)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._transport.close()
        errors = [task.exception() for task in done]
        for error in errors:
            if isinstance(error, AtollError):
                return error
        raise next(error for error in errors if error is not None)

    async def _read(self, on_frame: Callable[[Frame], None], read_gate: ReadGate) -> None:
        while True:
            if await read_gate.wait_open():
                self._last_seen = self._clock.monotonic()  # we paused, the hub was not silent
            message = await self._transport.receive()
            self._last_seen = self._clock.monotonic()
            frame = decode(message)
            if frame.kind is Kind.RELAY:
                self._counters.received_relay_bytes += len(message)
                verify(frame)
            else:
                self._counters.received_control_bytes += len(message)
            on_frame(frame)

    async def _beat(self, stats: Callable[[], dict[str, float]]) -> None:
        """Send heartbeats as requests: the answer proves that the hub is alive."""
        while True:
            await asyncio.sleep(self.welcome.heartbeat_s)
            id = next(self._ids)
            beat = pack(Beat(_read_stats(stats), self._clock.wall()), id=id)
            if not self._beat_id:
                self._beat_id, self._beat_at = id, self._clock.monotonic()
            await self.send(beat, kind=Kind.CONTROL)

    async def close(self) -> None:
        """Close a connection that `serve` does not serve."""
        await self._transport.close()

    def resolve(self, id: int) -> None:
        """Measure the round trip by the answer to a heartbeat."""
        if id == self._beat_id:
            self._beat_id = 0
            self._counters.measured(round_trip_s=self._clock.monotonic() - self._beat_at)

    async def _watch(self, read_gate: ReadGate, dead_after_s: float) -> None:
        """End the connection after silence of the hub, or when this machine slept.

        The monotonic clock stops during sleep, while hub and routers have dropped the connection,
        so it is ended as soon as the machine wakes.
        """
        ahead_s = self._clock.wall() - self._clock.monotonic()
        while True:
            await asyncio.sleep(dead_after_s / 8)
            before_s, ahead_s = ahead_s, self._clock.wall() - self._clock.monotonic()
            if ahead_s - before_s > SLEPT_S:
                asleep = f"the clock jumped by {ahead_s - before_s:.0f} s"
                raise ConnectionLost("this machine has slept", given=asleep)
            if read_gate.closed or self._transport.throttled:
                self._last_seen = self._clock.monotonic()  # we pause, the hub is not silent
            silent_s = self._clock.monotonic() - self._last_seen
            if silent_s > dead_after_s:
                raise ConnectionLost("the hub is silent", given=f"nothing for {silent_s:.3g} s")


def _read_stats(stats: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the values of a heartbeat; an error in their source must not end the session."""
    try:
        return {name: value for name, value in stats().items() if math.isfinite(value)}
    except Exception:
        logger.exception("the figures of a heartbeat could not be read")
        return {}
