"""What all processes on this machine share: the hub, the owner's offer, cores, memory, lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.net.api import HubClient
from atoll.net.way import Way
from atoll.node.launchers.launcher import Launcher
from atoll.node.launchers.memory import MemoryWatch
from atoll.node.launchers.shares import Shares
from atoll.node.preparing import Preparer
from atoll.node.reports import Reports
from atoll.node.shipping import LineShipping
from atoll.wire.messages import Offer


@dataclass(kw_only=True)
class Machine:
    """The machine as the processes on it see it."""

    jobs: Path
    """Folder below which each process has its own, `JOB/MEMBER`."""
    hub: str
    """URL that workers dial."""
    way: Way
    """How they reach it."""
    token: str
    """The node's own."""
    reports: Reports
    lines: LineShipping
    shares: Shares
    launcher: Callable[[str], Launcher]
    """Returns the launcher of a name: `process` or `container`."""
    preparer: Preparer
    watch: MemoryWatch = field(default_factory=MemoryWatch)
    offer: Offer = field(default_factory=Offer)
    """What the owner gives now."""
    nice: int = 0
    """The least niceness that the owner wants."""
    trusted_keys: Sequence[str] = ()
    """Public keys whose images the owner trusts."""

    def client(self) -> HubClient:
        """Return a client of the hub for this node; to be closed."""
        return HubClient(self.hub, self.token, way=self.way)
