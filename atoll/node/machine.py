"""What all processes on this machine share: the hub, the owner's offer, cores, memory, lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.config import JobSpec
from atoll.net.way import Way
from atoll.node.launchers.launcher import Launcher
from atoll.node.launchers.memory import MemoryWatch
from atoll.node.launchers.shares import Shares
from atoll.node.reports import Reports
from atoll.node.shipping import LineShipping
from atoll.wire.messages import Launch, Offer


@dataclass(frozen=True)
class Prepared:
    """Where a process works, and with which Python."""

    folder: Path
    python: Path


class Preparing(Protocol):
    """Makes ready what a process needs before it can start."""

    async def prepare(
        self,
        command: Launch,
        spec: JobSpec,
        *,
        directory: Path,
        on_line: Callable[[str], None],
    ) -> Prepared:
        """Return where it works; tell what happens line by line; cancellable."""
        ...


class NothingToPrepare:
    """The process works in its own folder, with the agent's Python."""

    async def prepare(
        self,
        command: Launch,
        spec: JobSpec,
        *,
        directory: Path,
        on_line: Callable[[str], None],
    ) -> Prepared:
        """Return the folder as it is."""
        return Prepared(directory, Path(sys.executable))


@dataclass(kw_only=True)
class Machine:
    """The machine as the processes on it see it."""

    jobs: Path
    """Folder below which each process has its own, `JOB/MEMBER`."""
    hub: str
    """URL that workers dial."""
    way: Way
    """How they reach it."""
    reports: Reports
    lines: LineShipping
    shares: Shares
    launcher: Callable[[str], Launcher]
    """Returns the launcher of a name: `process` or `container`."""
    preparing: Preparing
    watch: MemoryWatch = field(default_factory=MemoryWatch)
    offer: Offer = field(default_factory=Offer)
    """What the owner gives now."""
    nice: int = 0
    """The least niceness that the owner wants."""
    trusted_keys: Sequence[str] = ()
    """Public keys whose images the owner trusts."""
