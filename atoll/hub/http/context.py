"""State shared by all request handlers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.clock import Clock
from atoll.hub.nodes.access import Access
from atoll.hub.planning.planner import Planner
from atoll.hub.scheduler.rendezvous import RendezvousRegistry
from atoll.hub.security.audit import Audit
from atoll.hub.security.connection_limits import DEFAULT_LIMITS, Limits
from atoll.hub.security.pairing import Pairing
from atoll.hub.stores import Stores
from atoll.hub.verification.service import VerificationService
from atoll.wire.messages import Message


class LiveHub(Protocol):
    """Sessions, members and rounds, as the REST interface and the dashboard use them."""

    def nodes(self) -> list[dict[str, Any]]:
        """Return every known node: name, state, info, stats, bytes, running processes."""
        ...

    def members(self, job: str) -> dict[str, dict[str, Any]]:
        """Return, per member: `last_seen_s`, `sent_bytes`, `received_bytes`, `connected`."""
        ...

    def swarm(self, job: str) -> dict[str, Any] | None:
        """Return a SWARM's stages and members (`SwarmView`); None for other jobs."""
        ...

    def paths(self, job: str) -> dict[str, Any] | None:
        """Return the paths of a modular model (`PathsView`); None for other jobs."""
        ...

    async def rounds(self, job: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Return decided attempts with an id above `after`, oldest first."""
        ...

    async def submit(self, job: str) -> None:
        """Schedule a job that was just stored, or leave it waiting."""
        ...

    async def stop(self, job: str, *, grace_s: float) -> None:
        """Stop a job after its round, at the latest after `grace_s`."""
        ...

    async def scale(self, job: str, *, least: int, most: int) -> None:
        """Change the bounds on the members of a waiting or running job."""
        ...

    async def resume(self, job: str, *, spec: str = "", checkpoint: int | None = None) -> str:
        """Resume a job, optionally with a new `spec` or from the `checkpoint` of that round.

        Returns the id of the job that continues.
        """
        ...

    def relay(self) -> dict[str, float]:
        """Return the relay's counters: frames, bytes, dropped, sessions."""
        ...


class JobDeleter(Protocol):
    """The part of the hub that deletes jobs."""

    async def size(self, job: str) -> dict[str, Any]:
        """Return what deleting a job would remove."""
        ...

    async def delete(self, job: str, *, keep_files: bool = False, by: str) -> dict[str, Any]:
        """Delete an ended job; return what was removed."""
        ...


def _not_connected(address: str, notice: Message) -> bool:
    """Default without sessions."""
    return False


@dataclass(frozen=True, slots=True)
class Context:
    """State shared by all request handlers."""

    stores: Stores
    live: LiveHub
    clock: Clock
    version: str
    started: float
    ticket_of: Callable[[], str]
    """See `ticket`."""
    tell: Callable[[str, Message], bool] = _not_connected
    """Send a notice to a session; returns False if it is not connected."""
    access: Access | None = None
    """Access control; None: all joins and logins are refused."""
    audit: Audit | None = None
    deletions: JobDeleter | None = None
    """None: jobs cannot be deleted."""
    limits: Limits = DEFAULT_LIMITS
    rendezvous: RendezvousRegistry = field(default_factory=RendezvousRegistry)
    verification: VerificationService | None = None
    pairing: Pairing | None = None
    """None: machines join with tickets only."""
    planner: Planner | None = None
    url: str = ""
    """URL of the hub itself."""

    @property
    def ticket(self) -> str:
        """The standing ticket, `atoll://HOST:PORT/SECRET`; rotated keys change it."""
        return self.ticket_of()
