"""What an agent is started with, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.net.ticket import Ticket
from atoll.node.policy import FILE, PolicyFile
from atoll.node.preempt import Notices


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
    notices: Notices = field(default_factory=Notices)
    """Where a notice would appear that this machine is about to be taken away."""
    policy: Path | None = None
    """The owner's policy; None: `node.toml` in the home, if it is there."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the policy that win over its file."""
    proxy: str = ""
    """URL of the proxy to the hub; empty: as the environment says, or as before; `direct`: none."""
    machine: Path = Path("/")
    """Below which the sensors look for the files of this machine."""

    def policy_file(self) -> PolicyFile:
        """Return the policy that is in force, to be read."""
        path = self.policy or self.home / FILE
        return PolicyFile(path, options=self.policy_options, needed=self.policy is not None)


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
