"""Limits the rate of frames from a session or a token: excess frames are read later, not refused.

A normal process never reaches the limit. The hub pauses reading from one that floods, so that the
rounds and pages of others are not delayed.
"""

from __future__ import annotations

from atoll.wire.messages import (
    Event,
    LogLines,
    Message,
    Metrics,
    QueueAck,
    QueueAckMany,
    QueueClaim,
    QueueExtend,
    QueueExtendMany,
    QueueOpen,
    QueuePut,
    QueuePutMany,
    QueueRelease,
    TopicAck,
    TopicPublish,
    TopicRead,
)

FRAMES_PER_S = 2_000.0
"""Frames of one session in the long run, unless the hub's quotas say otherwise: about 5 % of the
hub's processor, as a frame costs it 25 us."""
REPORT_COST = 8.0
"""A log, metrics or event message counts as so many frames more: it is written to the database, in
a transaction of its own (event: 226 us)."""
LINE_COST = 0.05
"""The same for each line of a log message (500 lines of 200 bytes: 2.3 ms)."""
VALUE_COST = 0.1
"""The same for each value of a metrics message (50 values: 350 us)."""
QUEUE_COST = 4.0
"""A message about queues counts as so many frames more: it is a write, too, but shares its
transaction (a put of 10 kB: 124 us)."""
ITEM_COST = 0.25
"""The same for each item after the first."""
HTTP_COST = 16.0
"""Frames that a request by HTTP counts as (350 us)."""
BYTES_PER_FRAME = 2**10
"""A control message counts as one frame more for so many bytes: parsing 4 MB takes 100 ms."""
ITEM_BYTES_PER_FRAME = 8 * 2**10
"""The same of a message about queues, whose payloads are not looked into."""
LARGE_BYTES = 16 * 2**10
"""Relayed frames of so many bytes do not count: flow control limits them."""
BURST_S = 1.0
"""Frames of so many seconds may come at once after a quiet time."""
BURST = FRAMES_PER_S * BURST_S
LEAST_PAUSE_S, MOST_PAUSE_S = 0.02, 5.0
"""Shorter pauses are added up; longer ones would keep heartbeats waiting."""


_QUEUE: dict[type[Message], str] = {
    **dict.fromkeys((QueueAck, QueueClaim, QueueExtend, QueueOpen, QueuePut, QueueRelease), ""),
    **dict.fromkeys((QueueAckMany, QueueExtendMany), "leases"),
    **dict.fromkeys((TopicAck, TopicRead), ""),
    **dict.fromkeys((QueuePutMany, TopicPublish), "items"),
}
"""Messages about queues, and the field of each that lists its items."""


def cost_of(body: Message, nbytes: int) -> float:
    """Return the cost of a control message of `nbytes`, in frames."""
    field = _QUEUE.get(type(body))
    if field is not None:
        items = ITEM_COST * max(0, len(getattr(body, field)) - 1) if field else 0.0
        return 1.0 + QUEUE_COST + items + nbytes // ITEM_BYTES_PER_FRAME
    cost = 1.0 + nbytes // BYTES_PER_FRAME
    if isinstance(body, LogLines):
        return cost + REPORT_COST + LINE_COST * len(body.lines)
    if isinstance(body, Metrics):
        return cost + REPORT_COST + VALUE_COST * sum(len(point.values) for point in body.points)
    return cost + REPORT_COST if isinstance(body, Event) else cost


class RequestMeter:
    """A leaky bucket, and what it has counted."""

    __slots__ = ("_at", "_level", "frames", "limited_at", "paused_s", "rate")

    def __init__(self, rate: float = FRAMES_PER_S) -> None:
        """Let `rate` frames per second pass in the long run; 0: any number."""
        self.rate = rate
        self.frames = 0
        self.paused_s = 0.0
        """How long this session was made to wait."""
        self.limited_at = -1e9
        """When it last had to wait, in monotonic seconds."""
        self._level, self._at = 0.0, 0.0

    def idle(self, now: float) -> bool:
        """Return whether the bucket is empty."""
        return self._level <= (now - self._at) * self.rate

    def took(self, now: float, cost: float = 1.0, *, most_s: float = MOST_PAUSE_S) -> float:
        """Count a frame as `cost` many; return the seconds to wait before reading the next one."""
        self.frames += 1
        if not self.rate:
            return 0.0
        self._level = max(0.0, self._level - (now - self._at) * self.rate) + cost
        self._at = now
        pause_s = self._level / self.rate - BURST_S
        if pause_s < LEAST_PAUSE_S:
            return 0.0
        self.limited_at = now
        pause_s = min(pause_s, most_s)
        self.paused_s += pause_s
        return pause_s
