"""Virtual time: one heap of alarms, processes that can be stopped and killed, seeded chance.

Nothing here sleeps or starts a thread. Whatever happens in a simulated world is an alarm of this
heap, so that a seed names a schedule exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

BEGIN_S = 1_000.0
WALL_S = 1_790_000_000.0
"""What the wall clocks of the world show at time 0."""


class Process:
    """What can be stopped and killed as one: its alarms wait, or never go off."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.alive = True
        self.stopped = False
        self.stopped_since = 0.0
        self.wall_offset_s = 0.0
        self._held: list[Alarm] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def running(self) -> bool:
        """Whether it acts: neither dead nor stopped."""
        return self.alive and not self.stopped

    def stop(self) -> None:
        """Freeze it, as SIGSTOP does."""
        if self.alive and not self.stopped:
            self.stopped, self.stopped_since = True, self.scheduler.now

    def go_on(self) -> None:
        """Let it go on, as SIGCONT does; what it missed happens now, in order."""
        if not self.stopped:
            return
        self.stopped = False
        held, self._held = self._held, []
        for alarm in held:
            self.scheduler.put(alarm)

    def hold(self, alarm: Alarm) -> None:
        """Keep an alarm that went off while the process stands still."""
        self._held.append(alarm)

    def kill(self) -> None:
        """End it at once; subclasses drop what it had open."""
        self.alive = self.stopped = False
        self._held.clear()


class Alarm:
    """A call at a time."""

    __slots__ = ("call", "cancelled", "owner", "when")

    def __init__(self, when: float, call: Callable[[], Any], owner: Process | None) -> None:
        self.when = when
        self.call = call
        self.owner = owner
        self.cancelled = False

    def cancel(self) -> None:
        """Let it never go off."""
        self.cancelled = True


class Scheduler:
    """The clock of the world. The wall clock can be moved for one process alone."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.now = BEGIN_S
        self.current: Process | None = None
        """The owner of the alarm that goes off now."""
        self.steps = 0
        self._heap: list[tuple[float, int, Alarm]] = []
        self._count = 0

    def monotonic(self) -> float:
        """Return the simulated time in seconds."""
        return self.now

    def wall(self) -> float:
        """Return what the wall clock of the acting process shows."""
        offset_s = self.current.wall_offset_s if self.current is not None else 0.0
        return WALL_S + self.now + offset_s

    time = wall
    """So that a scheduler can take the place of the module `time`."""

    def at(self, when: float, call: Callable[[], Any], owner: Process | None = None) -> Alarm:
        """Have something called at a time, unless its owner is dead by then."""
        alarm = Alarm(max(when, self.now), call, owner)
        self.put(alarm)
        return alarm

    def after(self, seconds: float, call: Callable[[], Any], owner: Process | None = None) -> Alarm:
        """Have something called after so many seconds."""
        return self.at(self.now + seconds, call, owner)

    def put(self, alarm: Alarm) -> None:
        """Take up an alarm."""
        self._count += 1
        heapq.heappush(self._heap, (max(alarm.when, self.now), self._count, alarm))

    def step(self, until: float) -> bool:
        """Let the next alarm go off; False when none is due by `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, alarm = heapq.heappop(heap)
            owner = alarm.owner
            if alarm.cancelled or (owner is not None and not owner.alive):
                continue
            self.now = when
            if owner is not None and owner.stopped:
                owner.hold(alarm)
                continue
            self.steps += 1
            self.current = owner
            try:
                alarm.call()
            finally:
                self.current = None
            return True
        return False
