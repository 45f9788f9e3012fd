"""Sleep, announced on a real message bus of the test's own, and by a program's output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.node.availability.sensors import Commands
from atoll.node.availability.sleep import SleepWatch
from tests.node.availability.message_bus import announce, bus
from tests.node.availability.test_sensors import program
from tests.patience import PATIENCE_S

__all__ = ["bus"]  # a fixture

WAIT_S = PATIENCE_S


@contextlib.asynccontextmanager
async def watched(commands: Commands | None = None) -> AsyncIterator[tuple[SleepWatch, Heard]]:
    """Run a watch, and end it."""
    heard: Heard = asyncio.Queue()
    watch = SleepWatch(lambda: heard.put_nowait(watch.sleeping), commands=commands)
    running = asyncio.create_task(watch.run())
    try:
        yield watch, heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


Heard = asyncio.Queue[bool]


async def announced(heard: Heard, sleeping: str) -> bool:
    """Announce until it is heard: a listener takes a moment to be there."""
    async with asyncio.timeout(WAIT_S):
        while True:
            await asyncio.to_thread(announce, sleeping)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(heard.get(), 0.3)


@pytest.mark.usefixtures("bus")
def test_sleep_and_waking_are_heard_on_the_message_bus() -> None:
    async def scenario() -> None:
        async with watched() as (watch, heard):
            assert await announced(heard, "true")
            assert watch.sleeping
            assert not await announced(heard, "false")
            assert not watch.sleeping

    asyncio.run(scenario())


def test_second_listener_reports_sleep_under_a_lock(
    tmp_path: Path,
) -> None:
    line = "/org/freedesktop/login1: org.freedesktop.login1.Manager.PrepareForSleep (true,)"
    folder = tmp_path / "bin"
    program(folder, "gdbus", f"echo '{line}'", "exec sleep 60")
    lock = tmp_path / "locked"
    commands = program(
        folder, "systemd-inhibit", f"touch {lock}", f"trap 'rm {lock}; exit' TERM", "cat",
        f"rm {lock}",
    )  # fmt: skip

    async def scenario() -> None:
        async with watched(commands) as (watch, heard):
            async with asyncio.timeout(WAIT_S):
                assert await heard.get()
                while not lock.exists():
                    await asyncio.sleep(0.02)
                await watch.release()
                while lock.exists():
                    await asyncio.sleep(0.02)

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        asyncio.run(scenario())


def test_a_machine_without_any_listener_is_not_watched() -> None:
    async def scenario() -> None:
        watch = SleepWatch(lambda: None, commands=Commands("/nonexistent"))
        async with asyncio.timeout(WAIT_S):
            await watch.run()
        assert not watch.sleeping

    asyncio.run(scenario())
