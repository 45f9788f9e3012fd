"""The interface through which sessions report their events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from atoll.errors import AtollError
from atoll.wire.messages import Envelope

if TYPE_CHECKING:
    from atoll.hub.sessions.session import Session


class Listener(Protocol):
    """Receives the events of all sessions; implemented by the hub."""

    def opened(self, session: Session, *, resumed: bool) -> None:
        """A process connected; `resumed`: the same incarnation reconnected."""
        ...

    def lost(self, session: Session) -> None:
        """A session ended for good."""
        ...

    def received(self, session: Session, envelope: Envelope) -> None:
        """A control message arrived."""
        ...

    def rejected(self, peer: str, error: AtollError, *, job: str, source: str) -> None:
        """A connection was closed for a protocol or authentication error."""
        ...
