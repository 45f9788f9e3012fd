"""Watches the memory of process trees, and ends those that exceed their limit.

It samples twice per second: a short spike is missed, and a program that requests far too much at
once may be killed by the kernel first. The limit of a container is enforced by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from atoll import system
from atoll.errors import AtollError, OutOfMemory

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
GB = 10**9


class Watched(Protocol):
    """A process as seen by the watch."""

    @property
    def pid(self) -> int | None:
        """Its process id."""
        ...

    def fail(self, error: AtollError) -> None:
        """Kill it because of an error."""
        ...


@dataclass
class _Entry:
    process: Watched
    member: str
    limit_bytes: int
    limit_from: str
    family: dict[int, psutil.Process] = field(default_factory=dict)
    """All processes that it started, including those that have left its tree."""
    used_bytes: int = 0
    failed: bool = False


class MemoryWatch:
    """Watches processes with individual limits and a common one."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._entries: list[_Entry] = []
        self._task: asyncio.Task[None] | None = None
        self.total_bytes = 0
        """Limit of all processes together; 0: none. May be changed at any time."""

    def add(self, process: Watched, *, member: str, limit_bytes: int, limit_from: str) -> None:
        """Watch a process until `remove`; call it on the loop."""
        if process.pid is None:
            return
        self._entries.append(_Entry(process, member, limit_bytes, limit_from))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="memory-watch")

    def remove(self, process: Watched) -> None:
        """Stop watching a process, and kill what it left behind."""
        for entry in [entry for entry in self._entries if entry.process is process]:
            self._entries.remove(entry)
            _kill(entry)

    async def close(self) -> None:
        """Stop watching."""
        self._entries.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._entries:
            entries = list(self._entries)
            if self.total_bytes or any(entry.limit_bytes for entry in entries):
                await asyncio.to_thread(_measure, entries, total_bytes=self.total_bytes)
                self._judge([entry for entry in self._entries if not entry.failed])
            await asyncio.sleep(self._interval_s)

    def _judge(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.limit_bytes and entry.used_bytes > entry.limit_bytes:
                _end(entry, entry.limit_bytes, entry.limit_from)
        rest = [entry for entry in entries if not entry.failed]
        used = sum(entry.used_bytes for entry in rest)
        if self.total_bytes and used > self.total_bytes and rest:
            largest = max(rest, key=lambda entry: entry.used_bytes)
            source = f"the owner of this machine, for all work together, which uses {_gb(used)}"
            _end(largest, self.total_bytes, source)


def _end(entry: _Entry, limit_bytes: int, source: str) -> None:
    entry.failed = True
    error = OutOfMemory(
        f"{entry.member} used more memory than it may",
        given=f"{_gb(entry.used_bytes)} in {_count(len(entry.family))}",
        expected=f"at most {_gb(limit_bytes)}, a limit of {source}",
        remedy="make batch or the model smaller, or ask for more: memory_gb in [needs]",
    )
    log.warning("%s", error)
    entry.process.fail(error)
    _kill(entry)


def _kill(entry: _Entry) -> None:
    """Kill the rest of a family; `send_signal` checks that a process id was not reused."""
    for process in list(entry.family.values()):  # the measuring thread changes it
        with contextlib.suppress(psutil.Error):
            process.send_signal(system.KILL)


def _measure(entries: list[_Entry], *, total_bytes: int) -> None:
    """Measure the memory of every entry with one scan of the process table.

    Resident memory is fast to read but counts shared pages once per user; values above a limit are
    measured again, exactly.
    """
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children[process.ppid()].append(process)
    for entry in entries:
        _follow(entry, children)
        entry.used_bytes = sum(_resident(process) for process in entry.family.values())
    total_is_above = 0 < total_bytes < sum(entry.used_bytes for entry in entries)
    for entry in entries:
        if total_is_above or 0 < entry.limit_bytes < entry.used_bytes:
            entry.used_bytes = sum(_proportional(process) for process in entry.family.values())


def _follow(entry: _Entry, children: dict[int, list[psutil.Process]]) -> None:
    """Add the descendants of an entry to its family; drop ended processes."""
    root = entry.process.pid
    if root is not None and root not in entry.family:
        with contextlib.suppress(psutil.Error):
            entry.family[root] = psutil.Process(root)
    for pid in [pid for pid, process in entry.family.items() if not process.is_running()]:
        del entry.family[pid]
    todo = list(entry.family)
    while todo:
        for child in children.get(todo.pop(), []):
            if child.pid not in entry.family:
                entry.family[child.pid] = child
                todo.append(child.pid)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    """Return its memory with shared pages divided among their users, if available."""
    known = system.proportional_bytes(process.pid)
    return _resident(process) if known is None else known


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:.2f} GB"


def _count(processes: int) -> str:
    return "one process" if processes == 1 else f"{processes} processes"
