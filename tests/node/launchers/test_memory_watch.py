"""Processes that take too much memory, in every way they have. Real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atoll.errors import OutOfMemory
from atoll.node.launchers.launcher import Exit
from atoll.node.launchers.memory_watch import MemoryWatch, _Entry
from atoll.node.launchers.process import ProcessLauncher
from tests.node.launchers.ordering import command_launch, make_order, run, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses fork and /proc")

MB = 10**6

GREEDY = "x = bytearray({mb} * 10**6); print('has it', flush=True); import time; time.sleep(60)"

FORKING = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        x = bytearray({mb} * 10**6)
        time.sleep(60)
time.sleep(60)
"""

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    parent = os.getpid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        while os.getppid() == parent:
            time.sleep(0.05)
        x = bytearray({mb} * 10**6)
        time.sleep(600)
    while not os.path.exists({seen!r}):
        time.sleep(0.05)
    os._exit(0)
time.sleep(600)
"""

SHARING = """
import os, time
x = bytearray({mb} * 10**6)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(2.0)
        os._exit(0)
time.sleep(2.0)
"""


def watched(
    program: str,
    root: Path,
    *,
    limit_mb: int = 0,
    total_mb: int = 0,
    lines: list[str] | None = None,
    seen: Path | None = None,
) -> Exit:
    """Run a program under a watch until it ends.

    Once the watch knows the process whose id is its first line, `seen` appears.
    """
    said: list[str] = [] if lines is None else lines

    async def scenario() -> Exit:
        watch = MemoryWatch(interval_s=0.05)
        watch.total_bytes = total_mb * MB
        order = make_order(command_launch("python", "-c", program), root)
        process = await ProcessLauncher().start(order, said.append)
        watch.add(process, member="w1", limit_bytes=limit_mb * MB, limit_from="a test")
        if seen is not None:
            (entry,) = watch._entries
            await until(lambda: said and int(said[0]) in entry.family)
            seen.touch()
        ended = await process.wait()
        watch.remove(process)
        await watch.close()
        return ended

    return run(scenario())


def assert_out_of_memory(ended: Exit, *words: str) -> None:
    assert isinstance(ended.error, OutOfMemory), ended
    for word in ("w1", *words):
        assert word in str(ended.error)


def test_process_above_its_limit_is_killed_with_figures(
    tmp_path: Path,
) -> None:
    ended = watched(GREEDY.format(mb=300), tmp_path, limit_mb=150)
    assert_out_of_memory(ended, "at most 0.15 GB", "a limit of a test", "GB in one process")


def test_process_below_its_limit_is_left_alone(tmp_path: Path) -> None:
    ended = watched(
        "x = bytearray(50 * 10**6); import time; time.sleep(0.5)", tmp_path, limit_mb=150
    )
    assert ended.code == 0


def test_memory_limit_covers_forked_children(tmp_path: Path) -> None:
    ended = watched(FORKING.format(mb=80), tmp_path, limit_mb=200)
    assert_out_of_memory(ended, "4 processes")
    run(until(lambda: not [p for p in psutil.process_iter() if str(tmp_path) in _folder(p)]))


def test_process_that_leaves_its_tree_is_still_counted_and_ended(tmp_path: Path) -> None:
    lines: list[str] = []
    seen = tmp_path / "seen"
    program = DAEMON.format(mb=300, seen=str(seen))
    ended = watched(program, tmp_path, limit_mb=150, lines=lines, seen=seen)
    assert_out_of_memory(ended)
    run(until(lambda: not _alive(int(lines[0]))))


def test_pages_that_forks_share_count_once(tmp_path: Path) -> None:
    assert watched(SHARING.format(mb=100), tmp_path, limit_mb=220).code == 0


def test_largest_process_ends_above_the_owners_limit(tmp_path: Path) -> None:
    async def scenario() -> tuple[Exit, bool]:
        watch = MemoryWatch(interval_s=0.05)
        watch.total_bytes = 350 * MB
        lines: list[str] = []
        small, large = [
            await ProcessLauncher().start(
                make_order(
                    command_launch("python", "-c", GREEDY.format(mb=mb)), tmp_path / str(mb)
                ),
                lines.append,
            )
            for mb in (120, 300)
        ]
        watch.add(small, member="w0", limit_bytes=0, limit_from="")
        watch.add(large, member="w1", limit_bytes=0, limit_from="")
        ended = await large.wait()
        lives = _alive(small.pid)
        await small.stop(grace_s=1.0)
        await watch.close()
        return ended, lives

    ended, small_lives = run(scenario())
    assert_out_of_memory(ended, "at most 0.35 GB", "the owner of this machine", "all work together")
    assert small_lives


def test_family_may_change_while_it_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        order = make_order(command_launch("sleep", "60"), tmp_path)
        process = await ProcessLauncher().start(order, print)
        entry = _Entry(process, "w1", 0, "")

        class Measured(psutil.Process):
            """A process of a family that the measuring thread changes meanwhile."""

            def send_signal(self, sig: int) -> None:
                super().send_signal(sig)
                entry.family.pop(self.pid)

        entry.family = {child.pid: Measured(child.pid) for child in children}
        watch = MemoryWatch()
        watch._entries.append(entry)
        watch.remove(process)
        await process.stop(grace_s=0.0)
        await process.wait()

    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    run(scenario())
    assert [child.wait() for child in children] == [-9, -9]


def _folder(process: psutil.Process) -> str:
    try:
        return str(process.cwd())
    except psutil.Error:
        return ""


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
