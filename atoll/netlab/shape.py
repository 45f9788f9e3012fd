"""What the link of one host is like."""

from __future__ import annotations

import dataclasses
from typing import TypedDict, Unpack

from atoll.netlab.units import parse_rate, parse_share, parse_time

LEAST_QUEUE_S = 0.1
"""Home routers buffer at least so much: shorter queues starve TCP at slow rates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The link between one host and the rest of the world; 0 means no limit, or nothing."""

    up_bps: float = 0.0
    """Upload rate, bits per second."""
    down_bps: float = 0.0
    """Download rate, bits per second."""
    rtt_s: float = 0.0
    """Round trip between two hosts that both have this shape; half of it is added here."""
    jitter_s: float = 0.0
    """How far a round trip may be off, up or down."""
    loss: float = 0.0
    """Share of packets that get lost between two hosts of this shape, each way."""
    queue_s: float = 0.0
    """Buffer in front of each rate, in seconds at that rate; 0: 100 ms, or the round trip."""

    @property
    def queue_limit_s(self) -> float:
        """How long a packet may wait for its turn before the queue counts as full."""
        return self.queue_s or max(LEAST_QUEUE_S, self.rtt_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What packets from one host to another meet, in place of what both links say together."""

    rtt_s: float = 0.0
    """Round trip between the two."""
    bps: float = 0.0
    """Rate of this way; inside a network of each host in it. 0: no limit beside both links."""
    inside: bool = False
    """They share a network: their links to elsewhere do not carry these packets."""
    apart: bool = False
    """No packet arrives: both are behind routers that accept no connections."""

    @property
    def queue_limit_s(self) -> float:
        """How long a packet may wait for its turn."""
        return max(LEAST_QUEUE_S, self.rtt_s)


class Line(TypedDict, total=False):
    """A host's link as texts such as `20mbit`, `60ms`, `0.5%`."""

    rate: str
    """Both directions; not given: no limit."""
    up: str
    """Upload, if it is another."""
    down: str
    """Download, if it is another."""
    rtt: str
    """Round trip between two hosts."""
    jitter: str
    """How far a round trip may be off, up or down."""
    loss: str
    """Share of packets that get lost each way."""
    queue: str
    """Buffer in front of each rate, as time; not given: 100 ms, or the round trip."""


def parse_shape(**line: Unpack[Line]) -> Shape:
    """Return the shape of a line.

    Raises:
        ConfigError: a text is not a quantity of its kind.
    """
    return Shape(
        up_bps=parse_rate(line.get("up") or line.get("rate", "")),
        down_bps=parse_rate(line.get("down") or line.get("rate", "")),
        rtt_s=parse_time(line.get("rtt", "")),
        jitter_s=parse_time(line.get("jitter", "")),
        loss=parse_share(line.get("loss", "")),
        queue_s=parse_time(line.get("queue", "")),
    )
