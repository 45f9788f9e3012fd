"""Recent paths of microbatches through a SWARM, and failures of members, for display."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from atoll.wire.swarm import SwarmWatch

PATHS_KEPT = 512
FAILURES_KEPT = 256
RATE_S = 60.0
"""Time over which microbatches per second are counted."""
FAILED_LATELY_S = 600.0
SENT_LATELY_S = 60.0
"""Time over which the share of bytes sent directly is measured."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A member failed at a microbatch, and its driver has banned it."""

    time: float
    member: str
    reason: str
    banned_until: float


@dataclass
class Recent:
    """The newest paths and failures. Times are monotonic seconds."""

    _paths: deque[tuple[float, dict[int, str]]] = field(
        default_factory=lambda: deque(maxlen=PATHS_KEPT)
    )
    """When a microbatch was counted, and the member of each stage that counted it."""
    _sent: dict[str, deque[tuple[float, int, int]]] = field(default_factory=dict)
    """When a member reported how many bytes it has sent directly, and through the hub."""
    _failed: deque[Failed] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))

    def counted(self, path: dict[int, str], now: float) -> None:
        """A microbatch counts for these stages."""
        self._paths.append((now, path))

    def reported(self, member: str, body: SwarmWatch, now: float) -> None:
        """A member reports what failed since its last report, and what it has sent so far."""
        for one in body.failures:
            self._failed.append(Failed(now, one.member, one.reason, now + one.banned_s))
        samples = self._sent.setdefault(member, deque([(now, 0, 0)]))
        if samples[-1][1] > body.direct_bytes or samples[-1][2] > body.relayed_bytes:
            samples.clear()  # a new process
            samples.append((now, 0, 0))
        samples.append((now, body.direct_bytes, body.relayed_bytes))
        while len(samples) > 2 and samples[1][0] <= now - SENT_LATELY_S:
            samples.popleft()

    def direct(self, member: str) -> float | None:
        """Return the share of a member's bytes that went directly lately; None: it sent none."""
        samples = self._sent.get(member)
        if not samples:
            return None
        direct, relayed = (samples[-1][way] - samples[0][way] for way in (1, 2))
        return direct / (direct + relayed) if direct + relayed else None

    def in_a_row(self, stage: int, members: Collection[str]) -> list[Failed]:
        """Return the failures of a stage's members since a microbatch counted for it last."""
        since = max((time for time, path in self._paths if stage in path), default=-math.inf)
        return [one for one in self._failed if one.member in members and one.time > since]

    def shares(self, stage: int) -> dict[str, float]:
        """Return the share of the newest paths through a stage that each member took."""
        counts = Counter(path[stage] for _, path in self._paths if stage in path)
        return {member: count / counts.total() for member, count in counts.items()}

    def per_s(self, now: float) -> float:
        """Return the microbatches per second of the last `RATE_S`, or since the first one."""
        times = [time for time, _ in self._paths if time > now - RATE_S]
        if len(times) < 2:
            return 0.0
        earlier = len(times) < len(self._paths)
        since = now - RATE_S if earlier else times[0]
        return (len(times) if earlier else len(times) - 1) / max(now - since, 1e-9)

    def failures(self, member: str, now: float) -> list[Failed]:
        """Return the failures of a member in the last `FAILED_LATELY_S`, oldest first."""
        since = now - FAILED_LATELY_S
        return [one for one in self._failed if one.member == member and one.time > since]
