"""Makes orders for launchers, as the agent does."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atoll.config import JobSpec, JobTable, LaunchTable, dump_spec, parse_spec
from atoll.net.endpoint import PLAIN
from atoll.node.launchers.folder import lay_out
from atoll.node.launchers.launcher import Order, ResourceCaps, parse_mounts
from atoll.wire.messages import Launch
from tests.patience import PATIENCE_S

T = TypeVar("T")
HUB = "http://127.0.0.1:1"


def script_launch(script: str, *, name: str = "train.py", args: list[str] | None = None) -> Launch:
    """Return the command to run a script of Python."""
    spec = JobSpec(job=JobTable(name="job", script=name, args=args or []))
    return Launch("job-1", "w1", 1, "token", dump_spec(spec), files={name: script})


def command_launch(*words: str, launch: LaunchTable | None = None, **job: Any) -> Launch:
    """Return the command to run a program."""
    table = JobTable(name="job", command=list(words), **job)
    spec = JobSpec(job=table, launch=launch or LaunchTable())
    return Launch("job-1", "w1", 1, "token", dump_spec(spec))


def make_order(
    command: Launch,
    root: Path,
    *,
    caps: ResourceCaps | None = None,
    hub: str = HUB,
    allowed: Sequence[str] | None = None,
) -> Order:
    """Return the order for a command, its folder laid out below `root`.

    Args:
        command: What is to run.
        root: Folder of all jobs.
        caps: Its limits.
        hub: URL of the hub.
        allowed: Folders that the owner lets containers mount.
    """
    spec = parse_spec(command.spec)
    directory = root / command.job / command.member
    variables = lay_out(command, directory=directory, hub=hub, endpoint=PLAIN)
    return Order(
        command=command,
        spec=spec,
        directory=directory,
        folder=directory,
        python=Path(sys.executable),
        variables=variables,
        caps=caps or ResourceCaps(),
        mounts=tuple(parse_mounts(spec.launch.mounts, allowed=allowed or [])),
    )


def run(work: Awaitable[T]) -> T:
    """Run on a loop of its own, not for ever."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, timeout=PATIENCE_S)

    return asyncio.run(bounded())


async def until(condition: Callable[[], object], *, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)
