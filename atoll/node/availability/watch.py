"""Follows the owner's policy and the state of the machine, and reports changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
from collections.abc import Awaitable, Callable

from atoll.clock import Clock, RealClock
from atoll.node.availability.policy import OwnerPolicy, OwnerPolicyFile
from atoll.node.availability.rule import Hysteresis, Pause
from atoll.node.availability.sensors import Sensors
from atoll.node.availability.sleep import SleepWatch
from atoll.node.processes.threads import run_abandonable

LOOK_S = 1.0

Act = Callable[[OwnerPolicy, Pause], Awaitable[None]]


class AvailabilityWatch:
    """Watches one machine."""

    def __init__(
        self,
        file: OwnerPolicyFile,
        *,
        senses: Sensors | None = None,
        clock: Clock | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._file = file
        self._senses = senses or Sensors()
        self._clock = clock or RealClock()
        self._now = now
        self._mind = Hysteresis()
        self._news = asyncio.Event()
        self._sleep = SleepWatch(self._news.set)

    @property
    def error(self) -> str:
        """Error in the policy's file, while an older policy is in force."""
        return self._file.error

    async def look(self) -> tuple[OwnerPolicy, Pause]:
        """Return the policy, and whether work is paused.

        Raises:
            ConfigError: the policy is invalid and there was no valid one before.
        """
        policy = self._file.read()
        reading = await run_abandonable(lambda: self._senses.read(policy))
        if self._sleep.sleeping:
            reading = dataclasses.replace(reading, sleeping=True)
        pause = self._mind.follow(
            policy, reading, now=self._now(), monotonic=self._clock.monotonic()
        )
        return policy, pause

    async def follow(self, act: Act) -> None:
        """Call `act` now and whenever policy, pause or error change, until cancelled."""
        listening = asyncio.create_task(self._sleep.run())
        reported: tuple[OwnerPolicy, Pause, str] | None = None
        try:
            while True:
                self._news.clear()
                policy, pause = await self.look()
                if (policy, pause, self.error) != reported:
                    reported = policy, pause, self.error
                    await act(policy, pause)
                if pause.cause == "sleep":
                    await self._sleep.release()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOK_S)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
