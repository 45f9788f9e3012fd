"""Detects that the machine is about to sleep, and delays it until work has been returned.

The login manager (logind) announces sleep on the system's message bus, and lets programs delay it
by a few seconds. Without such a bus, sleep is noticed afterwards by the link to the hub, from the
jump of the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable

from atoll import system
from atoll.node.availability.sensors import Commands

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""Pause before an ended listener is restarted."""

LASTED_S = 5.0
"""A listener that ends sooner found no message bus and is not restarted."""

_SIGNAL = "PrepareForSleep"
_VALUE = re.compile(r"\b(true|false)\b")

_LISTENERS = (
    (
        "dbus-monitor", "--system",
        f"type='signal',interface='org.freedesktop.login1.Manager',member='{_SIGNAL}'",
    ),
    (
        "gdbus", "monitor", "--system", "--dest", "org.freedesktop.login1",
        "--object-path", "/org/freedesktop/login1",
    ),
)  # fmt: skip

_LOCK = (
    "systemd-inhibit", "--what=sleep", "--mode=delay", "--who=Atoll",
    "--why=work is given back to the cluster", "cat",
)  # fmt: skip


class SleepWatch:
    """Listens for sleep and holds the lock that delays it."""

    def __init__(self, on_change: Callable[[], None], *, commands: Commands | None = None) -> None:
        """Call `on_change` on the loop whenever `sleeping` changes."""
        self._on_change = on_change
        self._commands = commands or Commands()
        self._lock: asyncio.subprocess.Process | None = None
        self.sleeping = False
        """The machine is about to sleep, or has not announced that it is awake."""

    async def run(self) -> None:
        """Listen until cancelled; returns if this machine does not announce sleep."""
        loop = asyncio.get_running_loop()
        for name, *arguments in _LISTENERS:
            program = self._commands.find(name)
            while program is not None:
                started = loop.time()
                await self._take_lock()
                try:
                    await self._listen(program, arguments)
                finally:
                    await self.release()
                if loop.time() - started < LASTED_S:
                    break
                await asyncio.sleep(AGAIN_S)
        log.debug("this machine does not announce when it will sleep")

    async def release(self) -> None:
        """Let the machine sleep after the work was returned."""
        lock, self._lock = self._lock, None
        if lock is not None:
            await _end(lock)

    async def _listen(self, program: str, arguments: list[str]) -> None:
        listener = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=system.die_with_parent(),
        )
        assert listener.stdout is not None
        announced = False
        try:
            async for line in listener.stdout:
                text = line.decode("utf-8", "replace")
                announced = announced or _SIGNAL in text
                value = _VALUE.search(text.partition(_SIGNAL)[2] or text) if announced else None
                if value is not None and not text.startswith("signal "):
                    announced = False
                    await self._on_signal(value[1] == "true")
        finally:
            await _end(listener)

    async def _on_signal(self, sleeping: bool) -> None:
        if sleeping != self.sleeping:
            log.info("the machine %s", "goes to sleep" if sleeping else "is awake again")
            self.sleeping = sleeping
            if not sleeping:
                await self._take_lock()
            self._on_change()

    async def _take_lock(self) -> None:
        """Hold the lock, if there is a login manager."""
        program = self._commands.find(_LOCK[0])
        if self._lock is None and program is not None:
            self._lock = await asyncio.create_subprocess_exec(
                program,
                *_LOCK[1:],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        # Not process.terminate(): it would reap the exit status before asyncio can.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    await process.wait()
