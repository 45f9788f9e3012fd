"""Ranks of one machine, without torch: scripts, started as the members of a job are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from atoll.config import (
    IslandTable,
    JobSpec,
    JobTable,
    StrategyTable,
    dump_spec,
)
from atoll.node.launchers.launcher import Exit
from atoll.node.launchers.process import ChildProcess, ProcessLauncher
from atoll.wire.messages import Launch
from tests.node.islands.island_machines import alive
from tests.node.launchers.ordering import make_order, until

HEAD = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
print("here", rank, os.getpid(), flush=True)
def wait_for_all():
    open(f"up-{rank}", "w").close()
    while not all(os.path.exists(f"up-{r}") for r in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
"""


def island_of(script: str, *, ranks: int = 2, inner: str = "fsdp", **island: Any) -> Launch:
    """Return the command to start an island whose ranks run a script."""
    spec = JobSpec(
        job=JobTable(name="job", script="s.py"),
        strategy=StrategyTable(inner=inner),
        island=IslandTable(ranks=ranks, **island),
    )
    return Launch("job-1", "w1", 1, "token", dump_spec(spec), files={"s.py": HEAD + script})


@contextlib.asynccontextmanager
async def started(command: Launch, root: Path) -> AsyncIterator[tuple[ChildProcess, list[str]]]:
    """Yield a member's process and its lines; all of it is killed in the end."""
    lines: list[str] = []
    for left in (root / "job-1" / "w1").glob("up-*"):
        left.unlink()
    process = await ProcessLauncher().start(make_order(command, root), lines.append)
    try:
        yield process, lines
    finally:
        process.kill()
        await process.wait()


async def to_end(command: Launch, root: Path) -> tuple[Exit, list[str]]:
    async with started(command, root) as (process, lines):
        return await process.wait(), lines


def pids(lines: list[str]) -> dict[int, int]:
    """Return the process ids of the ranks that have reported them."""
    places = [line[line.index("here ") :].split() for line in lines if "here " in line]
    return {int(rank): int(pid) for _, rank, pid in places}


async def all_here(lines: list[str], *, ranks: int = 2) -> dict[int, int]:
    await until(lambda: len(pids(lines)) == ranks)
    return pids(lines)


async def none_lives(found: dict[int, int]) -> None:
    await until(lambda: not any(map(alive, found.values())))


def rank_of(ended: Exit) -> str:
    assert ended.error is not None
    return str(ended.error)
