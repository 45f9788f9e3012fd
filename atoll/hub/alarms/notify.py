"""Sends alarms by webhook, command or mail, without blocking the hub.

Every target has its own queue and task. A message holds all alarms since the last one, with a pause
between messages, so that a storm of alarms sends few messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.hub.alarms.engine import Alarm
from atoll.hub.alarms.notify_config import SEVERITIES, NotifyTarget
from atoll.hub.alarms.notify_senders import PermanentFailure, send
from atoll.hub.observability.events import Events

log = logging.getLogger(__name__)

GATHER_S = 1.0
"""Delay of a message, so that simultaneous alarms share it."""
MOST_WAITING = 1_000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

Send = Callable[[NotifyTarget, Mapping[str, Any]], Awaitable[None]]


def wanted(hook: NotifyTarget, alarm: Alarm) -> bool:
    """Return whether a target is notified of an alarm."""
    found = alarm.finding
    if alarm.silenced or (alarm.ended is not None and not hook.ends):
        return False
    if SEVERITIES.index(found.severity) < SEVERITIES.index(hook.min_severity):
        return False
    if hook.kinds and found.kind not in hook.kinds:
        return False
    return not hook.jobs or any(_fits(pattern, found.job) for pattern in hook.jobs)


def _fits(pattern: str, job: str) -> bool:
    if pattern.endswith("*"):
        return job.startswith(pattern[:-1])
    return job == pattern


class _Line:
    def __init__(self, hook: NotifyTarget) -> None:
        self.hook = hook
        self.waiting: deque[Alarm] = deque()
        self.left_out = 0
        self.came = asyncio.Event()

    def add(self, alarm: Alarm) -> None:
        if len(self.waiting) == MOST_WAITING:
            self.waiting.popleft()
            self.left_out += 1
        self.waiting.append(alarm)
        self.came.set()

    def take(self) -> tuple[list[Alarm], int]:
        """Return all waiting alarms, latest state only, and the number dropped."""
        newest = {alarm.id: alarm for alarm in self.waiting}
        left_out, self.left_out = self.left_out, 0
        self.waiting.clear()
        self.came.clear()
        return list(newest.values()), left_out


class Notifier:
    """All targets of a hub."""

    def __init__(
        self,
        hooks: Sequence[NotifyTarget],
        *,
        events: Events,
        clock: Clock,
        hub: str,
        send: Send = send,
        gather_s: float = GATHER_S,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`hub` is the name of the hub in messages."""
        self._lines = [_Line(hook) for hook in hooks]
        self._events, self._clock, self._hub, self._send = events, clock, hub, send
        self._gather_s, self._first_pause_s = gather_s, first_pause_s

    async def tell(self, alarm: Alarm) -> None:
        """Queue an alarm that has opened or ended; returns at once."""
        for line in self._lines:
            if wanted(line.hook, alarm):
                line.add(alarm)

    async def run(self) -> None:
        """Send queued alarms until cancelled."""
        async with asyncio.TaskGroup() as group:
            for line in self._lines:
                group.create_task(self._empty(line), name=line.hook.name)

    async def _empty(self, line: _Line) -> None:
        while True:
            await line.came.wait()
            await asyncio.sleep(self._gather_s)
            alarms, left_out = line.take()
            try:
                await self._deliver(line.hook, self.message(alarms, left_out=left_out))
            except Exception:
                log.exception("%s: a message was not sent", line.hook.name)
            await asyncio.sleep(line.hook.pause_s)

    def message(self, alarms: Sequence[Alarm], *, left_out: int = 0) -> dict[str, Any]:
        """Return the message for alarms, in the form of the API."""
        return {
            "hub": self._hub,
            "time": self._clock.wall(),
            "alarms": [alarm.view() for alarm in alarms],
            "left_out": left_out,
        }

    async def _deliver(self, hook: NotifyTarget, message: Mapping[str, Any]) -> None:
        """Send with retries; a final failure becomes an event."""
        pause_s = self._first_pause_s
        for attempt in range(1, hook.attempts + 1):
            try:
                await self._send(hook, message)
            except AtollError as error:
                log.info("%s, attempt %d: %s", hook.name, attempt, error)
                if attempt < hook.attempts and not isinstance(error, PermanentFailure):
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                    continue
                count = len(message["alarms"])
                text = (
                    f"{hook.name}: {count} alarms were not sent after {attempt} attempts: {error}"
                )
                await self._events.add("", "hook-failed", text, fields=error.to_dict())
            return
