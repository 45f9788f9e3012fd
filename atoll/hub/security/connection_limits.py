"""How many connections strangers may hold: bounded in all, per address, and in time.

A connection is a stranger's until it has shown a token that is right, in its Hello or in a request.
When too many strangers are there, the one that has been one for longest is dropped: an honest
machine says who it is within a second, so a flood drops itself.
"""

from __future__ import annotations

import collections
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from atoll.clock import Clock
from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What strangers may take of a hub."""

    strangers: int = 2_048
    """Connections that have shown no token, in all."""
    strangers_per_address: int = 256
    """The same of one address; a school behind one address reconnects at once."""
    head_s: float = 10.0
    """Time for the TLS handshake, and for the head of a request."""
    body_pause_s: float = 30.0
    """Longest pause in the body of a request."""
    open_body_s: float = 10.0
    """Time for the whole body of a request that needs no token."""
    joins_per_minute: int = 120
    """Joins and logins of one address."""
    exempt_loopback: bool = True
    """Whether this machine itself may do more; only the total holds for it."""


DEFAULT_LIMITS = Limits()


class Peer(Protocol):
    """What is known of whose token a connection has shown."""

    @property
    def role(self) -> str:
        """Kind of token."""
        ...

    @property
    def name(self) -> str:
        """Its owner."""
        ...

    @property
    def member(self) -> str:
        """The member of a job that it was made for; empty: any."""
        ...


class ConnectionSlot:
    """One connection, from its first byte to its last."""

    __slots__ = (
        "_limiter", "address", "certificate", "drop", "on_authenticated", "peer", "secure",
    )  # fmt: skip

    def __init__(self, limiter: ConnectionLimiter, address: str, drop: Callable[[], None]) -> None:
        self._limiter = limiter
        self.address = address
        self.drop = drop
        self.secure = False
        """Whether TLS is spoken."""
        self.certificate: PeerCertificate | None = None
        """What the other side showed during the TLS handshake; None: nothing."""
        self.on_authenticated: Callable[[], None] = _do_nothing
        """Called when it has shown a token that is right."""
        self.peer: Peer | None = None
        """Whose token that was."""

    def authenticated(self, peer: Peer) -> None:
        """It has shown a token that is right: it is no stranger any more."""
        if self.peer is not peer:
            self._limiter.mark_authenticated(self, peer)
            self.on_authenticated()

    def leave(self) -> None:
        """The connection is gone. May be called again."""
        self._limiter.leave(self)


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """A certificate that the hub's own authority signed, and that is valid now."""

    name: str
    """Common name: the node that it was made for."""
    serial: str
    """Hexadecimal, without leading zeros."""


class ConnectionLimiter:
    """Counts strangers."""

    def __init__(
        self, limits: Limits, *, exempt: Callable[[str], bool] = lambda address: False
    ) -> None:
        """Let strangers in within limits; addresses that are `exempt` count in the total only."""
        self.limits = limits
        self._exempt = exempt
        self._strangers: dict[ConnectionSlot, None] = {}
        """Oldest first."""
        self._by_address: collections.Counter[str] = collections.Counter()
        self._authenticated: set[ConnectionSlot] = set()
        self.refused = 0
        """Connections that were refused or dropped for somebody else."""

    def __len__(self) -> int:
        return len(self._strangers)

    def enter(self, address: str, drop: Callable[[], None]) -> ConnectionSlot | None:
        """Return the visit of a new connection, or None when its address has too many.

        Args:
            address: Where it comes from.
            drop: Cuts it, when it has to make room for another.
        """
        many = self._by_address.get(address, 0) >= self.limits.strangers_per_address
        if many and not self._is_exempt(address):
            self.refused += 1
            return None
        while len(self._strangers) >= self.limits.strangers:
            oldest = next(iter(self._strangers))
            self.leave(oldest)
            self.refused += 1
            oldest.drop()
        slot = ConnectionSlot(self, address, drop)
        self._strangers[slot] = None
        self._by_address[address] += 1
        return slot

    def mark_authenticated(self, slot: ConnectionSlot, peer: Peer) -> None:
        """Count a visit as a stranger's no longer: it is of somebody."""
        self.leave(slot)
        slot.peer = peer
        self._authenticated.add(slot)

    def leave(self, slot: ConnectionSlot) -> None:
        """Forget a visit."""
        self._authenticated.discard(slot)
        slot.peer = None
        if slot in self._strangers:
            del self._strangers[slot]
            self._by_address[slot.address] -= 1
            if not self._by_address[slot.address]:
                del self._by_address[slot.address]

    def cut(self, role: str, name: str, member: str = "") -> int:
        """Cut every connection of somebody at once; return how many there were.

        Without a member: those of all members of a job.
        """
        found = [
            slot for slot in self._authenticated
            if (peer := slot.peer) is not None
            and (peer.role, peer.name) == (role, name) and member in ("", peer.member)
        ]  # fmt: skip
        for slot in found:
            slot.drop()
        return len(found)

    def _is_exempt(self, address: str) -> bool:
        if self._exempt(address):
            return True
        return self.limits.exempt_loopback and is_loopback(address)


class RateLimit:
    """Counts what each address did lately, in bounded memory."""

    def __init__(self, clock: Clock, *, most: int, window_s: float, sources: int = 1_024) -> None:
        """Allow `most` within `window_s`; the `sources` newest addresses are remembered."""
        self._clock = clock
        self._most = most
        self._window_s = window_s
        self._sources = sources
        self._times: collections.OrderedDict[str, collections.deque[float]]
        self._times = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def reached(self, source: str) -> bool:
        """Return whether an address did it too often lately."""
        times = self._times.get(source)
        if times is None:
            return False
        now = self._clock.monotonic()
        while times and times[0] <= now - self._window_s:
            times.popleft()
        return len(times) >= self._most

    def note(self, source: str) -> None:
        """Count it once."""
        times = self._times.pop(source, None) or collections.deque(maxlen=self._most)
        times.append(self._clock.monotonic())
        self._times[source] = times
        if len(self._times) > self._sources:
            self._times.popitem(last=False)


def is_loopback(host: str) -> bool:
    """Return whether an address or a host name is this machine's own."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def networks(addresses: Iterable[str]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Return the networks that addresses like `10.0.0.1` or `10.0.0.0/8` name.

    Raises:
        ConfigError: one is neither.
    """
    found = []
    for text in addresses:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError as error:
            raise ConfigError(
                "this is not the address of a proxy",
                given=repr(text),
                expected="an address or a network, e.g. 127.0.0.1 or 10.0.0.0/8",
            ) from error
    return tuple(found)


def _do_nothing() -> None:
    """Stand in for a protocol that has nothing to widen."""
