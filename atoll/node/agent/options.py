"""What an agent is started with, and what it tells of itself.

What all processes on this machine share: the hub, the owner's offer, cores, memory, lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.net.endpoint import HubEndpoint, Ticket
from atoll.net.http.client import HubClient
from atoll.node.agent.log_shipping import LogShipper
from atoll.node.agent.reports import Reports
from atoll.node.agent.workspace import WorkspaceBuilder
from atoll.node.availability.policy import FILE, OwnerPolicyFile
from atoll.node.availability.preemption import PreemptionNotices
from atoll.node.launchers.launcher import Launcher
from atoll.node.launchers.memory_watch import MemoryWatch
from atoll.node.launchers.resources import ResourceAllocator
from atoll.wire.messages import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the person at this machine decided."""

    ticket: Ticket
    home: Path
    """Folder of this agent: identity, policy, jobs."""
    name: str = ""
    """Start of the node's id; empty: the machine's host name."""
    slots: int = 1
    """How many workers it takes at once."""
    measure: bool = True
    """Whether speeds are measured: matmuls before joining (seconds, once), the way to the hub."""
    notices: PreemptionNotices = field(default_factory=PreemptionNotices)
    """Where a notice would appear that this machine is about to be taken away."""
    policy: Path | None = None
    """The owner's policy; None: `node.toml` in the home, if it is there."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the policy that win over its file."""
    proxy: str = ""
    """URL of the proxy to the hub; empty: as the environment says, or as before; `direct`: none."""
    machine: Path = Path("/")
    """Below which the sensors look for the files of this machine."""

    def policy_file(self) -> OwnerPolicyFile:
        """Return the policy that is in force, to be read."""
        path = self.policy or self.home / FILE
        return OwnerPolicyFile(path, options=self.policy_options, needed=self.policy is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the agent is doing, for one line on a screen."""

    node: str
    connected: bool
    running: list[str]
    sent_bytes: int
    received_bytes: int
    draining: str = ""
    """Why it takes no work now."""
    paused: str = ""
    """Why its owner's policy has it take no work now."""
    policy: tuple[str, ...] = ()
    """The policy in words, a line each."""


@dataclass(kw_only=True)
class Machine:
    """The machine as the processes on it see it."""

    jobs: Path
    """Folder below which each process has its own, `JOB/MEMBER`."""
    hub: str
    """URL that workers dial."""
    endpoint: HubEndpoint
    """How they reach it."""
    token: str
    """The node's own."""
    reports: Reports
    lines: LogShipper
    shares: ResourceAllocator
    launcher: Callable[[str], Launcher]
    """Returns the launcher of a name: `process` or `container`."""
    preparer: WorkspaceBuilder
    watch: MemoryWatch = field(default_factory=MemoryWatch)
    offer: Offer = field(default_factory=Offer)
    """What the owner gives now."""
    nice: int = 0
    """The least niceness that the owner wants."""
    trusted_keys: Sequence[str] = ()
    """Public keys whose images the owner trusts."""

    def client(self) -> HubClient:
        """Return a client of the hub for this node; to be closed."""
        return HubClient(self.hub, self.token, endpoint=self.endpoint)
