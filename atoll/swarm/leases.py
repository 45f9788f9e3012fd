"""The leases of the present step: which driver works on which microbatch."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from atoll.wire.swarm import Holder, SwarmLease

FIRST_LEASE_S = 120.0
"""Time limit of a lease while none was measured; then `LATE` times the usual time."""
LATE = 8.0
LEAST_LEASE_S = 10.0
EMA = 0.1
SILENT_S = 15.0
"""No microbatch is kept for a driver that neither requested nor finished one for this long."""


Place = tuple[int, int]
"""Step and index of a microbatch."""


@dataclass
class _Leased:
    lease: SwarmLease
    driver: Holder
    since: float


@dataclass
class Leases:
    """Leases by number; `lacking` below maps places to the stages that have not counted them.

    An evaluation is lacking without a stage.
    """

    _open: dict[int, _Leased] = field(default_factory=dict)
    _usual_s: float | None = None
    _last_seen: dict[Holder, float] = field(default_factory=dict)
    """When each driver last requested or finished something."""

    def __len__(self) -> int:
        """Return the number of open leases."""
        return len(self._open)

    def start(self, lease: SwarmLease, driver: Holder, now: float) -> None:
        """Lease a microbatch to a driver."""
        self._open[lease.lease] = _Leased(lease, driver, now)

    def end(self, lease: int, now: float) -> bool:
        """End the lease of a finished microbatch; return whether it was open."""
        leased = self._open.pop(lease, None)
        if leased is None:
            return False
        self._last_seen[leased.driver] = now
        if not leased.lease.stages:
            return True  # an evaluation takes less
        took_s = now - leased.since
        usual_s = took_s if self._usual_s is None else self._usual_s
        self._usual_s = (1 - EMA) * usual_s + EMA * took_s
        return True

    def forget(self, driver: Holder) -> None:
        """Drop the leases of a lost driver."""
        self._open = {n: x for n, x in self._open.items() if x.driver != driver}
        self._last_seen.pop(driver, None)

    def begin(self, step: int) -> None:
        """Drop the leases of earlier steps."""
        self._open = {n: x for n, x in self._open.items() if x.lease.step >= step}

    def clear(self) -> None:
        """Drop all leases."""
        self._open.clear()

    def again(
        self, driver: Holder, holding: Collection[int], lacking: Mapping[Place, list[int]]
    ) -> list[SwarmLease]:
        """Return leases that a driver does not know it has, or has given up too early.

        Those that another lease has brought through meanwhile end here.
        """
        unknown = [
            x.lease for n, x in self._open.items() if x.driver == driver and n not in holding
        ]
        for lease in unknown:
            stages = lacking.get((lease.step, lease.index))
            if stages is None or (stages and not set(lease.stages) & set(stages)):
                del self._open[lease.lease]
        return [lease for lease in unknown if lease.lease in self._open]

    def part(self, driver: Holder, free: int, row_s: Mapping[Holder, float], now: float) -> int:
        """Return how many of so many free microbatches a driver that asks takes at most.

        Each goes to the driver that would be done with it first, by the drivers' seconds per row
        (0: unknown, as the mean) and what they have under way. Otherwise the last microbatches of
        a step wait in the queue of a slow driver while fast ones are idle.
        """
        self._last_seen[driver] = now
        known = [seconds for seconds in row_s.values() if seconds > 0]
        usual = sum(known) / len(known) if known else 1.0
        under_way = dict.fromkeys(row_s, 0)
        for leased in self._open.values():
            if leased.driver in under_way:
                under_way[leased.driver] += 1
        ends = [
            ((under_way[each] + 1) * (seconds or usual), each != driver, each, seconds or usual)
            for each, seconds in row_s.items()
            if now - self._last_seen.get(each, -SILENT_S) < SILENT_S
        ]
        heapq.heapify(ends)
        count = 0
        for _ in range(free):
            end_s, other, first, seconds = ends[0]
            count += not other
            heapq.heapreplace(ends, (end_s + seconds, other, first, seconds))
        return count

    def free(
        self,
        driver: Holder,
        lacking: Mapping[Place, list[int]],
        row_s: Mapping[Holder, float],
        now: float,
    ) -> list[tuple[Place, list[int]]]:
        """Return what to lease to a driver that asks, each with the stages that lack it.

        First its part of what is under no lease, by the seconds per row of all drivers and in each
        step, then what another driver has had for too long, once.
        """
        under: dict[Place, list[_Leased]] = {}
        for leased in self._open.values():
            place = leased.lease.step, leased.lease.index
            under.setdefault(place, []).append(leased)
        unleased = [(place, stages) for place, stages in lacking.items() if place not in under]
        limit_s = FIRST_LEASE_S
        if self._usual_s is not None:
            limit_s = max(LEAST_LEASE_S, LATE * self._usual_s)
        late = [
            (place, lacking[place])
            for place, leases in under.items()
            if place in lacking and len(leases) == 1
            and leases[0].driver != driver and now - leases[0].since > limit_s
        ]  # fmt: skip
        step = min(lacking, default=(0, 0))[0]
        first = [entry for entry in unleased if entry[0][0] == step]
        early = unleased[len(first) :]
        parts = [part[: self.part(driver, len(part), row_s, now)] for part in (first, early)]
        return [*parts[0], *late, *parts[1]]
