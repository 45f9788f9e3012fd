"""What a request handler can reach: the stores, and the living half of the hub by a protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.clock import Clock
from atoll.hub.nodes.access import Access
from atoll.hub.scheduler.rendezvous import RendezvousRegistry
from atoll.hub.security.audit import Audit
from atoll.hub.security.connection_limits import DEFAULT_LIMITS, Limits
from atoll.hub.stores import Stores
from atoll.wire.messages import Message


class LiveHub(Protocol):
    """Sessions, members and rounds, as the REST interface and the dashboard see them."""

    def nodes(self) -> list[dict[str, Any]]:
        """Return every known node: name, state, info, stats, bytes, what it runs."""
        ...

    def members(self, job: str) -> dict[str, dict[str, Any]]:
        """Return, per member: `last_seen_s`, `sent_bytes`, `received_bytes`, `connected`."""
        ...

    async def rounds(self, job: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Return decided attempts with an id above `after`, oldest first."""
        ...

    async def submit(self, job: str) -> None:
        """Place a job that was just stored, or leave it waiting."""
        ...

    async def stop(self, job: str, *, grace_s: float) -> None:
        """End a job after its round, at the latest after `grace_s`."""
        ...

    async def scale(self, job: str, *, least: int, most: int) -> None:
        """Let a job that waits or runs have other bounds of members from now on."""
        ...

    async def resume(self, job: str, *, spec: str = "") -> str:
        """Start a job again from its newest checkpoint; return which job goes on.

        `spec`, unless empty, is a changed job file to go on with.
        """
        ...

    def relay(self) -> dict[str, float]:
        """Return the relay's counters: frames, bytes, dropped, sessions."""
        ...


class JobDeleter(Protocol):
    """The part of the hub that deletes jobs."""

    async def size(self, job: str) -> dict[str, Any]:
        """Return what would go with a job."""
        ...

    async def delete(self, job: str, *, keep_files: bool = False, by: str) -> dict[str, Any]:
        """Delete a job that has ended; return what went."""
        ...


def _nobody(address: str, notice: Message) -> bool:
    """Stand in where no sessions are: nobody is reached."""
    return False


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that request handlers share."""

    stores: Stores
    live: LiveHub
    clock: Clock
    version: str
    started: float
    """Seconds since 1970."""
    ticket: str
    """Whole text, `atoll://HOST:PORT/SECRET`."""
    tell: Callable[[str, Message], bool] = _nobody
    """Sends a notice to a session; False when nobody is there."""
    access: Access | None = None
    """Lets in and shuts out; None: nobody can come."""
    audit: Audit | None = None
    """Who did what."""
    deletions: JobDeleter | None = None
    """Deletes jobs; None: none can be deleted."""
    limits: Limits = DEFAULT_LIMITS
    """What strangers may take."""
    rendezvous: RendezvousRegistry = field(default_factory=RendezvousRegistry)
    """Where islands await their further machines."""
