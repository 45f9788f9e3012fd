"""Options and status of an agent, and the state shared by all processes on its machine."""

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
from atoll.node.launchers.launcher import Launcher, Sandbox
from atoll.node.launchers.memory_watch import MemoryWatch
from atoll.node.launchers.resources import ResourceAllocator
from atoll.wire.messages import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options chosen by the person at this machine."""

    ticket: Ticket
    home: Path
    """Folder of this agent: identity, policy, jobs."""
    name: str = ""
    """Prefix of the node's id; empty: the host name."""
    slots: int = 0
    """Processes at once; 0: one per accelerator that the owner offers, else one."""
    measure: bool = True
    """Whether to measure matmuls before joining (once a day), and the bandwidth to the hub."""
    notices: PreemptionNotices = field(default_factory=PreemptionNotices)
    """Where notices of preemption appear."""
    policy: Path | None = None
    """The owner's policy; None: `node.toml` in the home, if it exists."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys that override the policy file."""
    proxy: str = ""
    """URL of the proxy to the hub; empty: from the environment, or unchanged; `direct`: none."""
    machine: Path = Path("/")
    """Root of the system files that sensors read."""

    def policy_file(self) -> OwnerPolicyFile:
        """Return the owner's policy file, not yet read."""
        path = self.policy or self.home / FILE
        return OwnerPolicyFile(path, options=self.policy_options, needed=self.policy is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One-line status of the agent."""

    node: str
    connected: bool
    running: list[str]
    sent_bytes: int
    received_bytes: int
    draining: str = ""
    paused: str = ""
    """Why the owner's policy pauses work now."""
    policy: tuple[str, ...] = ()
    """The policy in words, one line each."""
    computes_on: str = ""
    idle: str = ""
    """See `NodeInfo`."""


@dataclass(kw_only=True)
class Machine:
    """State of the machine shared by its processes."""

    jobs: Path
    """Parent of the process folders, `JOB/MEMBER`."""
    hub: str
    """URL for workers."""
    endpoint: HubEndpoint
    """How workers reach the hub."""
    token: str
    reports: Reports
    lines: LogShipper
    shares: ResourceAllocator
    launcher: Callable[[str], Launcher]
    """Returns a launcher by name: `process` or `container`."""
    preparer: WorkspaceBuilder
    watch: MemoryWatch = field(default_factory=MemoryWatch)
    offer: Offer = field(default_factory=Offer)
    nice: int = 0
    trusted_keys: Sequence[str] = ()
    sandbox: Sandbox | None = None
    """Isolation of processes of jobs; None: they run as any program of this user."""

    def client(self) -> HubClient:
        """Return a client of the hub for this node; the caller closes it."""
        return HubClient(self.hub, self.token, endpoint=self.endpoint)
