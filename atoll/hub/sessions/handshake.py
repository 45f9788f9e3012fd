"""Checks the first message of a connection, and estimates clock offsets from heartbeats."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import MutableMapping
from typing import Any

from atoll import __version__
from atoll.errors import AuthError, VersionMismatch, WireError
from atoll.hub.security.auth import Auth, Identity
from atoll.wire.frames import Kind, decode
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Envelope, Hello, Message, unpack

MAX_ADDRESS = 255

_REMEMBERED = 8
"""Replaced processes remembered per address."""

_ADDRESSES = 4_096
"""Addresses remembered; the oldest is dropped first."""


def check_hello(hello: Message, *, auth: Auth, source: str) -> tuple[Hello, Identity]:
    """Return a valid Hello and the identity of its token.

    Raises:
        WireError: the message is not a Hello.
        VersionMismatch: the peer speaks another version of the protocol.
        AuthError: the token is unknown, or is not valid for this session.
    """
    if not isinstance(hello, Hello):
        raise WireError(
            "the first message must be Hello", given=type(hello).__name__, expected="Hello"
        )
    if hello.protocol != PROTOCOL:
        raise VersionMismatch(
            "the two sides use different versions of the protocol",
            given=f"version {hello.protocol} (Atoll {hello.version})",
            expected=f"version {PROTOCOL} (Atoll {__version__})",
            remedy="install the same version of Atoll on both machines",
        )
    identity = auth.authenticate(hello.token, source=source)
    if not 0 < len(hello.session) <= MAX_ADDRESS or not auth.may_open_session(
        identity, hello.session
    ):
        raise AuthError(
            "this token may not open this session",
            given=f"{hello.session[:MAX_ADDRESS]} with a token of {identity.role} {identity.name}",
        )
    return hello, identity


class ReplacedProcesses:
    """Processes replaced by a newer one at the same address, in bounded memory."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, deque[str]] = OrderedDict()

    def add(self, address: str, incarnation: str) -> None:
        """Record a replaced process."""
        known = self._by_address.setdefault(address, deque(maxlen=_REMEMBERED))
        known.append(incarnation)
        self._by_address.move_to_end(address)
        if len(self._by_address) > _ADDRESSES:
            self._by_address.popitem(last=False)

    def check(self, hello: Hello) -> None:
        """Reject a replaced process, e.g. one that was suspended and resumed, with AuthError."""
        if hello.incarnation in self._by_address.get(hello.session, ()):
            raise AuthError(
                "a newer process has taken this session over",
                given=hello.session,
                expected="one process per session",
                remedy="this process has to end; the newer one continues",
            )


WINDOW_S = 30.0


class ClockOffset:
    """Estimates how far a peer's clock is off, from the times in its heartbeats.

    A sample is the sender's clock minus the delay of the message, so the largest is the best. The
    maximum is kept for the current and the last window.
    """

    __slots__ = ("_before", "_began", "_best")

    def __init__(self) -> None:
        self._best: float | None = None
        self._before: float | None = None
        self._began = 0.0

    def note(self, theirs: float, received: float) -> None:
        """Add a heartbeat sent at wall time `theirs` (0: unknown), `received` at monotonic time."""
        if not 0.0 < theirs < 1e12:
            return
        if received - self._began >= WINDOW_S:
            self._before, self._best, self._began = self._best, None, received
        seen = theirs - received
        self._best = seen if self._best is None else max(self._best, seen)

    def skew_s(self, *, wall: float, monotonic: float, latency_s: float = 0.0) -> float | None:
        """Return the sender's clock minus the hub's, in seconds; None without a sample.

        `wall` and `monotonic` are the hub's clocks now; `latency_s` is a known one-way delay.
        """
        seen = [value for value in (self._best, self._before) if value is not None]
        return max(seen) - (wall - monotonic) + latency_s if seen else None


def of_another_site(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a page of another site opens the socket; programs send no Origin."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def first_message(message: MutableMapping[str, Any]) -> Envelope:
    """Return what the first message of a connection says; raises WireError."""
    data = message.get("bytes")
    if data is None:
        raise WireError("unexpected text message", expected="binary messages only")
    frame = decode(data)
    if frame.kind is not Kind.CONTROL:
        raise WireError("the first message must be Hello", given="a relay frame")
    return unpack(frame)
