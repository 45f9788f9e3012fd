"""The agent's reports to the hub, and the statistics in a node's heartbeat."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil

from atoll.errors import AtollError, AuthError, ConfigError, DeadlineExceeded, WireError
from atoll.net.link import Link
from atoll.net.retry import backoff
from atoll.net.transport import LinkCounters
from atoll.node.availability.sensors import Battery
from atoll.node.machine.probe import Gpus, existing
from atoll.wire.messages import Launch, Message, ProcessState
from atoll.wire.states import ProcessPhase

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
"""How long one report waits for its answer before it is sent again."""

LAST_REPORTS_S = 1.0
"""Time for the last reports when the agent ends."""

_REFUSALS = (AuthError, ConfigError, WireError)
"""Answers to a report that make repeating it useless."""


class Reports:
    """Sends reports in background tasks; owns every task of the agent until it has ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def tell(self, body: Message) -> asyncio.Task[None]:
        """Report something in a background task."""
        return self.spawn(self.deliver(body))

    def process(self, command: Launch, state: ProcessPhase, **more: Any) -> asyncio.Task[None]:
        """Report the state of a process in a background task."""
        job, member, attempt = command.job, command.member, command.attempt
        return self.tell(ProcessState(job, member, state, attempt=attempt, **more))

    async def deliver(self, body: Message) -> None:
        """Send a report; repeat it until the hub accepts or refuses it, or the link has failed."""
        waits = backoff()
        while self._link.failed is None:
            try:
                await self._link.request(body, timeout_s=ANSWER_TIMEOUT_S)
                return
            except DeadlineExceeded:
                continue
            except _REFUSALS as error:
                log.warning("the hub refused %s: %s", body, error)
                return
            except AtollError as error:
                log.warning("the hub could not take %s: %s", body, error)
                await asyncio.sleep(next(waits))

    async def close(self) -> None:
        """Wait briefly for the last reports, then cancel every task."""
        pending = [task for task in self._tasks if not task.done()]
        if pending and self._link.connected:
            await asyncio.wait(pending, timeout=LAST_REPORTS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the agent failed", exc_info=task.exception())


class HeartbeatStats:
    """Measures the machine whenever it is called; fast, and never loads torch."""

    def __init__(self, home: Path, *, gpus: Gpus | None = None, root: Path = Path("/")) -> None:
        """Measure the disk of `home`; sensors read below `root`."""
        self._home = home
        self._gpus = gpus or Gpus()
        self._battery = Battery(root)
        self.counters: LinkCounters | None = None
        """Of the link to the hub, once there is one."""
        self.up_bps = 0.0
        self.down_bps = 0.0
        """Measured bandwidth to the hub; 0: not measured yet."""

    def __call__(self) -> dict[str, float]:
        """Return percentages, sizes in bytes, and bits per second; omits unknown values."""
        memory = psutil.virtual_memory()
        figures = {
            "cpu_percent": psutil.cpu_percent(interval=None),
            "memory_percent": memory.percent,
            "memory_free_bytes": float(memory.available),
            "load": psutil.getloadavg()[0],
            "disk_free_bytes": float(shutil.disk_usage(existing(self._home)).free),
            **self._gpus.figures(),
        }
        power = self._battery.read()
        if power.battery_percent is not None:
            figures["battery_percent"] = power.battery_percent
            figures["on_battery"] = float(bool(power.on_battery))
        if self.counters is not None:
            figures["reconnects"] = float(self.counters.reconnects)
            if self.counters.round_trip_s:
                figures["latency_ms"] = self.counters.round_trip_s * 1000
        if self.up_bps:
            figures["up_bps"], figures["down_bps"] = self.up_bps, self.down_bps
        return figures
