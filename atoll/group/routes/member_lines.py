"""How the members of one job connect to each other: encrypted, or authenticated only."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from atoll.errors import AtollError, AuthError
from atoll.group.routes.authenticated_line import AuthenticatedLine
from atoll.net.member_tls import MemberKey, MemberTls, SecureLine

ASK_S = 0.5
"""Least time between two questions to the hub about the members' keys."""


class Line(Protocol):
    """A connection of two members, on which a stranger can neither write, change nor replay."""

    def send(self, body: bytes) -> None:
        """Send one message; raises OSError."""
        ...

    def receive(self, *, most: int) -> bytes:
        """Return one message; raises OSError, WireError above `most` bytes, and AuthError."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether data has arrived."""
        ...


class KnownMembers:
    """The fingerprints of the members' own keys, as the hub reports them. Thread-safe."""

    def __init__(self, ask: Callable[[], Mapping[str, str]]) -> None:
        """Ask the hub, which may raise AtollError, whenever a member shows another key."""
        self._ask = ask
        self._known: Mapping[str, str] = {}
        self._asked_at = -ASK_S
        # Held while asking, so that many connections at once cause one request.
        self._lock = threading.Lock()

    def has(self, member: str, fingerprint: str) -> bool:
        """Return whether this is the member's key; False also if the hub does not answer.

        Blocks while the hub is asked, e.g. about a member that has started again.
        """
        if self._is(member, fingerprint):
            return True
        with self._lock:
            if not self._is(member, fingerprint):
                time.sleep(max(0.0, self._asked_at + ASK_S - time.monotonic()))
                with suppress(AtollError):
                    self._known = self._ask()
                self._asked_at = time.monotonic()
            return self._is(member, fingerprint)

    def _is(self, member: str, fingerprint: str) -> bool:
        return bool(fingerprint) and self._known.get(member) == fingerprint


class MemberLines:
    """Makes connections with members that know the key of the job."""

    def __init__(
        self, key: bytes, *, me: str, own: MemberKey | None = None, encrypted: bool = True,
        known: KnownMembers | None = None,
    ) -> None:  # fmt: skip
        """Speak for the member `me`, with its own key pair.

        With `known` a line is of a member only if it shows that member's key; without, names are
        not verified. Without `encrypted` lines are authenticated by the job's key alone, and can
        be read by others on the network.

        Raises:
            AuthError: the key is empty.
        """
        self.key, self._known = key, known
        self.tls = MemberTls(key, name=me, key=own) if encrypted else None

    def is_other(self, line: Line, member: str) -> bool:
        """Return whether a line is not of this member, as far as it can be known."""
        if not isinstance(line, SecureLine):
            return False
        if line.peer != member:
            return True
        return self._known is not None and not self._known.has(member, line.fingerprint)

    def listening(self, line: socket.socket) -> Line:
        """Return the line of a member that has connected; raises OSError and AuthError."""
        if self.tls is not None:
            return self.tls.listening(line)
        return AuthenticatedLine.listening(line, key=self.key)

    def dialling(self, line: socket.socket, *, to: str = "") -> Line:
        """Return the line to a member that this one has dialled.

        Raises:
            OSError: it does not answer.
            AuthError: it does not know the key of the job, or is not the member `to`, if given.
        """
        if self.tls is not None:
            found = self.tls.dialling(line, to=to)
            if to and self.is_other(found, to):
                raise AuthError(
                    "another process answers there", given=f"a key {found.fingerprint[:16]}",
                    expected=f"that of {to}, as the hub knows it",
                )  # fmt: skip
            return found
        return AuthenticatedLine.dialling(line, key=self.key)
