"""Who may open which session: the checks of the first message of a connection.

How far a machine's clock is off, from the times in its heartbeats; constant memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from atoll import __version__
from atoll.errors import AuthError, VersionMismatch, WireError
from atoll.hub.security.auth import Auth, Identity
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Hello, Message

MAX_ADDRESS = 255
"""Characters of a session's address."""

_REMEMBERED = 8
"""Replaced processes that are known per address."""

_ADDRESSES = 4_096
"""Addresses whose replaced processes are known; the oldest is forgotten first."""


def check_hello(hello: Message, *, auth: Auth, source: str) -> tuple[Hello, Identity]:
    """Return a Hello that is in order, and who says it.

    Raises:
        WireError: it is no Hello.
        VersionMismatch: the peer speaks another version of the protocol.
        AuthError: its token is unknown, or is not for this session.
    """
    if not isinstance(hello, Hello):
        raise WireError(
            "the first message must be Hello", given=type(hello).__name__, expected="Hello"
        )
    if hello.protocol != PROTOCOL:
        raise VersionMismatch(
            "the two sides speak different versions of the protocol",
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
    """Remembers the processes whose sessions newer ones took over, in bounded memory."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, deque[str]] = OrderedDict()

    def add(self, address: str, incarnation: str) -> None:
        """Note that a newer process has taken the place of this one."""
        known = self._by_address.setdefault(address, deque(maxlen=_REMEMBERED))
        known.append(incarnation)
        self._by_address.move_to_end(address)
        if len(self._by_address) > _ADDRESSES:
            self._by_address.popitem(last=False)

    def check(self, hello: Hello) -> None:
        """Refuse a process that was replaced, e.g. one that was frozen and runs again.

        Raises:
            AuthError: it has to end.
        """
        if hello.incarnation in self._by_address.get(hello.session, ()):
            raise AuthError(
                "a newer process has taken this session over",
                given=hello.session,
                expected="one process per session",
                remedy="this process has to end; the newer one goes on",
            )


WINDOW_S = 30.0
"""A heartbeat that was held up for less than this disturbs nothing."""


class ClockOffset:
    """The smallest delay of the newest heartbeats tells most of the clock.

    What is seen is the sender's clock minus the delay of the message, so the largest value of some
    time is the nearest to the truth. Two windows are kept, so that an old value fades.
    """

    __slots__ = ("_before", "_began", "_best")

    def __init__(self) -> None:
        """Know nothing."""
        self._best: float | None = None
        self._before: float | None = None
        self._began = 0.0

    def note(self, theirs: float, heard: float) -> None:
        """Take a heartbeat in.

        Args:
            theirs: The sender's wall clock when it was sent; 0: not told.
            heard: The hub's monotonic time when it came.
        """
        if not 0.0 < theirs < 1e12:
            return
        if heard - self._began >= WINDOW_S:
            self._before, self._best, self._began = self._best, None, heard
        seen = theirs - heard
        self._best = seen if self._best is None else max(self._best, seen)

    def skew_s(self, *, wall: float, monotonic: float, latency_s: float = 0.0) -> float | None:
        """Return the sender's clock minus the hub's; None: it was never told.

        Args:
            wall: The hub's wall clock now.
            monotonic: Its monotonic clock at the same moment.
            latency_s: A one-way delay that is known, added again.
        """
        seen = [value for value in (self._best, self._before) if value is not None]
        return max(seen) - (wall - monotonic) + latency_s if seen else None
