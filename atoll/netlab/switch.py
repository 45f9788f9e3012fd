"""The model of the network: when does each packet arrive, if at all? Pure, without clock or I/O.

A packet from host A to host B passes four things in this order: A's upload rate with its queue,
half of A's round trip, B's download rate with its queue, and B's receiver. A rate is a line that
is free again when the packet before has left it; a queue that would take longer than its limit
drops the packet, as a router does. The order of one host's packets is kept, with jitter too.

    round trip (A, B) = rtt_A / 2 + rtt_B / 2          loss likewise

The path between two hosts may differ from that (`Between`): a network of their own, a slower or
longer path, or none.
"""

from __future__ import annotations

import heapq
import itertools
import random as random_module
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from atoll.netlab.packets import on_the_wire, receivers
from atoll.netlab.shape import Between, Shape

MOST_HELD_BYTES = 256 * 2**20
"""Packets beyond this are dropped, whatever the shapes say: the machine has to live."""


@dataclass(slots=True)
class HostStats:
    """Totals of one host, as its own link saw them; segments and headers as on a real wire."""

    sent_bytes: int = 0
    sent_packets: int = 0
    received_bytes: int = 0
    received_packets: int = 0
    lost_packets: int = 0
    """Lost at random, as the shape asks."""
    dropped_packets: int = 0
    """Dropped at a full queue."""
    cut_packets: int = 0
    """Dropped while the host was cut off, or for a host that it cannot reach."""


@dataclass(slots=True)
class _Line:
    """One direction of a link: a rate and what waits for it."""

    free_at: float = 0.0

    def pass_through(self, now: float, nbytes: int, *, bps: float, queue_s: float) -> float | None:
        """Return when the last bit has left, or None when the queue is full."""
        if not bps:
            return now
        start = max(now, self.free_at)
        if start - now > queue_s:
            return None
        self.free_at = start + nbytes * 8 / bps
        return self.free_at


@dataclass(slots=True)
class _Host:
    shape: Shape
    up: _Line = field(default_factory=_Line)
    down: _Line = field(default_factory=_Line)
    last_out: float = 0.0
    """When its last packet comes out of its delay: later ones may not overtake."""
    cut: bool = False
    stats: HostStats = field(default_factory=HostStats)


_Due = tuple[float, int, int, int, bytes]
"""When, a tie-breaker, the sender while the download is still to pass (else -1), to which host, the
packet."""
PASSED = -1


class Switch:
    """All hosts and every packet that is under way. Times are seconds of any steady clock."""

    def __init__(
        self, shapes: Sequence[Shape], *, random: random_module.Random | None = None
    ) -> None:
        self._hosts = [_Host(shape) for shape in shapes]
        self._random = random or random_module.Random()
        self._between: dict[tuple[int, int], Between] = {}
        self._own_lines: dict[tuple[int, int], _Line] = defaultdict(_Line)
        """Of pairs; of (host, -1) the way out inside a network, of (-1, host) the way in."""
        self._due: list[_Due] = []
        self._order = itertools.count()
        self._held_bytes = 0

    def set_shape(self, host: int, shape: Shape) -> None:
        """Change a link; packets that are under way keep their times."""
        self._hosts[host].shape = shape

    def set_between(self, sender: int, receiver: int, between: Between) -> None:
        """Say what packets from one host to another meet."""
        self._between[sender, receiver] = between

    def set_cut(self, host: int, *, cut: bool) -> None:
        """Pull the cable of a host, or plug it in again."""
        self._hosts[host].cut = cut

    def stats(self) -> list[dict[str, int]]:
        """Return the totals of every host."""
        return [asdict(host.stats) for host in self._hosts]

    def arrive(self, sender: int, packet: bytes, now: float) -> None:
        """Take a packet that a host sent."""
        host = self._hosts[sender]
        nbytes, segments = on_the_wire(packet)
        if host.cut:
            host.stats.cut_packets += segments
            return
        targets = receivers(packet, sender=sender, hosts=len(self._hosts))
        between = self._between.get((sender, targets[0])) if len(targets) == 1 else None
        if between is not None and between.apart:
            host.stats.cut_packets += segments
            return
        shape = host.shape
        out = self._upload(host, sender, targets, between, nbytes=nbytes, now=now)
        if out is None or self._held_bytes > MOST_HELD_BYTES:
            host.stats.dropped_packets += segments
            return
        host.stats.sent_bytes += nbytes
        host.stats.sent_packets += segments
        if self._lost(host, segments):
            return
        if between is not None:  # the whole way's delay; lines keep the order of a pair
            out += between.rtt_s / 2
        else:
            out += max(0.0, shape.rtt_s / 2 + self._random.uniform(-1, 1) * shape.jitter_s / 2)
            out = host.last_out = max(out, host.last_out)
        for receiver in targets:
            self._push(out, receiver, packet, sender=sender)

    def _upload(
        self, host: _Host, sender: int, targets: Sequence[int], between: Between | None, *,
        nbytes: int, now: float,
    ) -> float | None:  # fmt: skip
        """Return when a packet has left; None: a queue is full."""
        shape = host.shape
        if between is not None and between.inside:
            line = self._own_lines[sender, PASSED]
            return line.pass_through(now, nbytes, bps=between.bps, queue_s=between.queue_limit_s)
        out = host.up.pass_through(now, nbytes, bps=shape.up_bps, queue_s=shape.queue_limit_s)
        if out is None or between is None or not between.bps:
            return out
        line = self._own_lines[sender, targets[0]]
        return line.pass_through(out, nbytes, bps=between.bps, queue_s=between.queue_limit_s)

    def next_due(self) -> float | None:
        """Return when `deliveries` will have something to do, or None when nothing is under way."""
        return self._due[0][0] if self._due else None

    def deliveries(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yield host and packet of all that has arrived by `now`, in order."""
        while self._due and self._due[0][0] <= now:
            due, _, sender, receiver, packet = heapq.heappop(self._due)
            self._held_bytes -= len(packet)
            host = self._hosts[receiver]
            nbytes, segments = on_the_wire(packet)
            if host.cut:
                host.stats.cut_packets += segments
            elif sender != PASSED:
                self._download(sender, receiver, packet, nbytes=nbytes, segments=segments, now=due)
            else:
                host.stats.received_bytes += nbytes
                host.stats.received_packets += segments
                yield receiver, packet

    def _download(
        self, sender: int, receiver: int, packet: bytes, *, nbytes: int, segments: int, now: float
    ) -> None:
        """Let a packet pass the receiver's download."""
        host, between = self._hosts[receiver], self._between.get((sender, receiver))
        if self._lost(host, segments):
            return
        shape = host.shape
        line, bps, queue_s = host.down, shape.down_bps, shape.queue_limit_s
        if between is not None and between.inside:
            line = self._own_lines[PASSED, receiver]
            bps, queue_s = between.bps, between.queue_limit_s
        out = line.pass_through(now, nbytes, bps=bps, queue_s=queue_s)
        if out is None:
            host.stats.dropped_packets += segments
            return
        self._push(out, receiver, packet, sender=PASSED)

    def _lost(self, host: _Host, segments: int) -> bool:
        """Draw whether a packet gets lost on this host's half of the way."""
        loss = host.shape.loss / 2
        if loss and self._random.random() < loss:
            host.stats.lost_packets += segments
            return True
        return False

    def _push(self, due: float, receiver: int, packet: bytes, *, sender: int) -> None:
        heapq.heappush(self._due, (due, next(self._order), sender, receiver, packet))
        self._held_bytes += len(packet)
