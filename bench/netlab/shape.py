"""What the link of one host is like."""

from __future__ import annotations

import dataclasses

from bench.netlab.units import parse_rate, parse_share, parse_time

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


def parse_shape(
    *,
    rate: str = "",
    up: str = "",
    down: str = "",
    rtt: str = "",
    jitter: str = "",
    loss: str = "",
    queue: str = "",
) -> Shape:
    """Return a shape from texts such as `20mbit`, `60ms`, `0.5%`; `rate` is both directions.

    Raises:
        ConfigError: a text is not a quantity of its kind.
    """
    return Shape(
        up_bps=parse_rate(up or rate),
        down_bps=parse_rate(down or rate),
        rtt_s=parse_time(rtt),
        jitter_s=parse_time(jitter),
        loss=parse_share(loss),
        queue_s=parse_time(queue),
    )
