"""Connections of the simulated network: in order, delayed, and breakable at every message.

Like TCP, a connection loses nothing in its middle: what was sent arrives in order, or the
connection ends and its tail is lost. Delays of different connections are independent, so frames of
different sessions overtake each other freely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from atoll.simulate.scheduler import Process, Scheduler

DEAD_AFTER_S = 15.0
"""Silence after which either end gives a connection up."""

BEAT_S = 2.0
ACCEPT_TIMEOUT_S = 10.0

UP, DOWN = 0, 1
"""Towards the server, towards the client."""


@dataclass
class Line:
    """What one process's way to all others is like."""

    scheduler: Scheduler
    delay_s: float = 0.002
    jitter_s: float = 0.002
    bps: float = 0.0
    """0: as fast as it goes."""
    dark_since: float = 0.0
    dark_until: float = 0.0
    """Nothing passes, and nobody is told."""
    refused_until: float = 0.0
    """New connections fail at once."""
    twice_until: float = 0.0
    """Requests and relayed frames are sent twice."""
    busy_until: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def dark(self) -> bool:
        return self.scheduler.now < self.dark_until

    def arrival(self, nbytes: int, direction: int) -> float:
        """Return when something sent now arrives."""
        now = self.scheduler.now
        delay_s = self.delay_s + self.scheduler.random.random() * self.jitter_s
        begin = now
        if self.bps:
            begin = max(now, self.busy_until[direction])
            begin = self.busy_until[direction] = begin + nbytes * 8 / self.bps
        when = begin + delay_s
        if when < self.dark_until:  # the sender's kernel tries again until it gets through
            when = self.dark_until + 0.2 * self.scheduler.random.random()
        return when


class End(Protocol):
    """One side of a connection."""

    def received(self, connection: Connection, message: Any) -> None:
        """Something arrived."""
        ...

    def disconnected(self, connection: Connection, code: int) -> None:
        """The connection is over."""
        ...


class Connection:
    """One connection between a client's process and a server's."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        client: tuple[Process, End, Line],
        server: tuple[Process, End, Line | None],
    ) -> None:
        self.scheduler = scheduler
        self.began = self.heard = scheduler.now
        self.number = 0
        self.line = client[2]
        self._lines = [line for line in (client[2], server[2]) if line is not None]
        self._process = (server[0], client[0])
        """Receiver by direction."""
        self._end: tuple[End, End] = (server[1], client[1])
        self._open = [True, True]
        """Whether the receiver of a direction still reads."""
        self._last = [0.0, 0.0]

    @property
    def open(self) -> bool:
        return self._open[UP] and self._open[DOWN]

    def send(self, message: Any, direction: int, *, nbytes: int = 200) -> None:
        """Put a message on its way."""
        if not self._open[direction] or not self._process[1 - direction].alive:
            return
        when = max(self._last[direction], *(x.arrival(nbytes, direction) for x in self._lines))
        self._last[direction] = when

        def arrive() -> None:
            if self._open[direction]:
                if direction == UP:
                    self.heard = self.scheduler.now
                self._end[direction].received(self, message)

        self.scheduler.at(when, arrive, self._process[direction])

    def close(self, side: int, code: int = 1000) -> None:
        """End it from one side: the other reads what was sent before, then its end."""
        if not self._open[1 - side] and not self._open[side]:
            return
        self._open[1 - side] = False  # what comes towards this side is not read any more
        other = side
        when = max(self._last[other], *(x.arrival(60, other) for x in self._lines))
        self.scheduler.at(when, lambda: self._over(other, code), self._process[other])

    def cut(self, code: int = 1006) -> None:
        """Break it: what is under way is lost, both sides find out."""
        self._open = [False, False]
        for direction in (UP, DOWN):
            when = max(x.arrival(60, direction) for x in self._lines)
            end, process = self._end[direction], self._process[direction]
            self.scheduler.at(when, partial(end.disconnected, self, code), process)

    def _over(self, direction: int, code: int) -> None:
        if self._open[direction]:
            self._open[direction] = False
            self._end[direction].disconnected(self, code)

    def died(self, process: Process) -> None:
        """One of the processes is dead: its kernel ends the connection."""
        for direction in (UP, DOWN):
            if self._process[direction] is process:
                self._open[direction] = False
            else:
                when = max(self._last[direction], *(x.arrival(60, direction) for x in self._lines))
                over = partial(self._over, direction, 1006)
                self.scheduler.at(when, over, self._process[direction])

    def heard_of_client(self) -> float:
        """Return when the server last got a sign of life; idle clients send one every 2 s."""
        now, client = self.scheduler.now, self._process[DOWN]
        quiet_since = now
        if not client.alive:
            return self.heard
        if client.stopped:
            quiet_since = client.stopped_since
        for line in self._lines:
            if line.dark:
                quiet_since = min(quiet_since, line.dark_since)
        beats = int((quiet_since - self.began) / BEAT_S)
        return max(self.heard, min(now, self.began + beats * BEAT_S))


Accept = Callable[[Connection, Any], None]
