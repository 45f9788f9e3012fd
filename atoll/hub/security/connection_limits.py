"""Limits on unauthenticated connections: in total, per address, and in time.

A valid token authenticates a connection. At the total, the oldest unauthenticated one is dropped:
correct clients authenticate within a second, so a flood drops its own connections.
"""

from __future__ import annotations

import collections
import functools
import gc
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from atoll.clock import Clock
from atoll.errors import ConfigError
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.quotas.limits import Kind
from atoll.system import release_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on unauthenticated connections."""

    strangers: int = 1_024
    """In all. With TLS one takes up to 40 kB."""
    strangers_per_address: int = 256
    """The same per address; many machines behind one NAT address may reconnect at once."""
    head_s: float = 10.0
    """Timeout of the TLS handshake, and of the head of a request."""
    body_pause_s: float = 30.0
    """Longest pause in the body of a request."""
    open_body_s: float = 10.0
    """Timeout of the whole body of a request that needs no token."""
    joins_per_minute: int = 120
    exempt_loopback: bool = True
    """Whether connections from this machine count in the total only."""


DEFAULT_LIMITS = Limits()

REMEDY = (
    "end processes that use this token, or wait until connections that are broken time out; or "
    "let the hub's owner raise the limit"
)

FLOOD = 128
"""Peak of unauthenticated connections after which freed memory is returned to the system."""


class Peer(Protocol):
    """The owner of the token that a connection has sent."""

    @property
    def role(self) -> str:
        """Role of the token."""
        ...

    @property
    def name(self) -> str:
        """Name of the owner."""
        ...

    @property
    def member(self) -> str:
        """The member that a job token was issued to; empty: any."""
        ...


class ConnectionSlot:
    """One connection, counted from accept to close."""

    __slots__ = (
        "_limiter", "address", "certificate", "drop", "on_authenticated", "peer", "secure",
    )  # fmt: skip

    def __init__(self, limiter: ConnectionLimiter, address: str, drop: Callable[[], None]) -> None:
        self._limiter = limiter
        self.address = address
        self.drop = drop
        self.secure = False
        self.certificate: PeerCertificate | None = None
        self.on_authenticated: Callable[[], None] = _do_nothing
        self.peer: Peer | None = None
        """None: not authenticated."""

    def authenticated(self, peer: Peer) -> None:
        """Mark the connection as authenticated; raises LimitReached if its token has too many."""
        if self.peer is not peer:
            self._limiter.mark_authenticated(self, peer)
            self.on_authenticated()

    def leave(self) -> None:
        """Release the slot; may be called again."""
        self._limiter.leave(self)


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """A valid client certificate signed by the hub's own authority."""

    name: str
    """Common name: the node id."""
    serial: str


class ConnectionLimiter:
    """Counts unauthenticated connections and tracks authenticated ones."""

    def __init__(
        self,
        limits: Limits,
        *,
        exempt: Callable[[str], bool] = lambda address: False,
        ledger: Ledger | None = None,
    ) -> None:
        """Apply `limits`; `exempt` addresses count in the total only.

        The `ledger` limits the connections of each token.
        """
        self.limits = limits
        self._ledger = ledger
        self._by_token: collections.Counter[Holder] = collections.Counter()
        if ledger is not None:
            ledger.sources.append(self._uses)
        self._exempt = exempt
        self._strangers: dict[ConnectionSlot, None] = {}
        """Oldest first."""
        self._by_address: collections.Counter[str] = collections.Counter()
        self._authenticated: set[ConnectionSlot] = set()
        self.refused = 0
        self._most = 0
        """Unauthenticated connections at once since memory was last returned."""

    def __len__(self) -> int:
        return len(self._strangers)

    def enter(self, address: str, drop: Callable[[], None]) -> ConnectionSlot | None:
        """Return the slot of a connection, or None if refused; `drop` closes it to make room."""
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
        self._most = max(self._most, len(self._strangers))
        self._by_address[address] += 1
        return slot

    def settle(self) -> bool:
        """Return the memory of a flood that is over to the system; return whether one was.

        The allocator keeps the fragmented memory of many closed connections unless asked.
        """
        if self._most < FLOOD or len(self._strangers) > self._most // 4:
            return False
        self._most = len(self._strangers)
        gc.collect()  # connections are reference cycles
        return release_memory()

    def mark_authenticated(self, slot: ConnectionSlot, peer: Peer) -> None:
        """Count a connection for its token; raises LimitReached if that has too many."""
        holder = _holder(peer)
        before = slot.peer
        if self._ledger is not None and (before is None or _holder(before) != holder):
            limit = self._ledger.limit(Kind.CONNECTIONS, holder)
            if 0 < limit <= (used := self._by_token[holder]):
                raise self._ledger.refuse(
                    Kind.CONNECTIONS, holder, used=used, wanted=1, remedy=REMEDY
                )
        self.leave(slot)
        slot.peer = peer
        self._authenticated.add(slot)
        self._by_token[holder] += 1

    def leave(self, slot: ConnectionSlot) -> None:
        """Remove a connection."""
        self._authenticated.discard(slot)
        if slot.peer is not None:
            holder = _holder(slot.peer)
            self._by_token[holder] -= 1
            if not self._by_token[holder]:
                del self._by_token[holder]
        slot.peer = None
        if slot in self._strangers:
            del self._strangers[slot]
            self._by_address[slot.address] -= 1
            if not self._by_address[slot.address]:
                del self._by_address[slot.address]

    def cut(self, role: str, name: str, member: str = "") -> int:
        """Close every connection of an identity (no member: of the whole job); return how many."""
        found = [
            slot for slot in self._authenticated
            if (peer := slot.peer) is not None
            and (peer.role, peer.name) == (role, name) and member in ("", peer.member)
        ]  # fmt: skip
        for slot in found:
            slot.drop()
        return len(found)

    async def _uses(self) -> list[tuple[Kind, Holder, int]]:
        return [(Kind.CONNECTIONS, holder, number) for holder, number in self._by_token.items()]

    def _is_exempt(self, address: str) -> bool:
        if self._exempt(address):
            return True
        return self.limits.exempt_loopback and is_loopback(address)


class RateLimit:
    """Counts recent actions per address, in bounded memory."""

    def __init__(self, clock: Clock, *, most: int, window_s: float, sources: int = 1_024) -> None:
        """Allow `most` in `window_s` seconds; remember the `sources` most recent addresses."""
        self._clock = clock
        self._most = most
        self._window_s = window_s
        self._sources = sources
        self._times: collections.OrderedDict[str, collections.deque[float]]
        self._times = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def reached(self, source: str) -> bool:
        """Return whether an address has reached its limit."""
        times = self._times.get(source)
        if times is None:
            return False
        now = self._clock.monotonic()
        while times and times[0] <= now - self._window_s:
            times.popleft()
        return len(times) >= self._most

    def note(self, source: str) -> None:
        """Count one action."""
        times = self._times.pop(source, None) or collections.deque(maxlen=self._most)
        times.append(self._clock.monotonic())
        self._times[source] = times
        if len(self._times) > self._sources:
            self._times.popitem(last=False)


@functools.lru_cache(maxsize=1_024)
def is_loopback(host: str) -> bool:
    """Return whether an address or host name is of the loopback interface."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def networks(addresses: Iterable[str]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Parse addresses like `10.0.0.1` or `10.0.0.0/8`; raises ConfigError."""
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


def _holder(peer: Peer) -> Holder:
    return Holder(peer.role, peer.name, peer.member)


def _do_nothing() -> None:
    """Default of `on_authenticated`."""
