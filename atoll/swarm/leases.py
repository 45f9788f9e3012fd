"""The leases of the present step: which driver works on which microbatch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from atoll.wire.swarm import Holder, SwarmLease

FIRST_LEASE_S = 120.0
"""Time limit of a lease while none was measured; then `LATE` times the usual time."""
LATE = 8.0
LEAST_LEASE_S = 10.0
EMA = 0.1


@dataclass
class _Leased:
    lease: SwarmLease
    driver: Holder
    since: float


@dataclass
class Leases:
    """Leases by number; `lacking` below maps each index to the stages that have not counted it."""

    _open: dict[int, _Leased] = field(default_factory=dict)
    _usual_s: float | None = None

    def __len__(self) -> int:
        """Return the number of open leases."""
        return len(self._open)

    def start(self, lease: SwarmLease, driver: Holder, now: float) -> None:
        """Lease a microbatch to a driver."""
        self._open[lease.lease] = _Leased(lease, driver, now)

    def end(self, lease: int, now: float) -> None:
        """A microbatch is through."""
        leased = self._open.pop(lease, None)
        if leased is not None:
            took_s = now - leased.since
            usual_s = took_s if self._usual_s is None else self._usual_s
            self._usual_s = (1 - EMA) * usual_s + EMA * took_s

    def forget(self, driver: Holder) -> None:
        """A driver is lost."""
        self._open = {n: x for n, x in self._open.items() if x.driver != driver}

    def clear(self) -> None:
        """The step is over."""
        self._open.clear()

    def again(
        self, driver: Holder, holding: Collection[int], lacking: Mapping[int, list[int]]
    ) -> list[SwarmLease]:
        """Return leases that a driver does not know it has, or has given up too early.

        Those that another lease has brought through meanwhile end here.
        """
        unknown = [
            x.lease for n, x in self._open.items() if x.driver == driver and n not in holding
        ]
        for lease in unknown:
            if not set(lease.stages) & set(lacking.get(lease.index, ())):
                del self._open[lease.lease]
        return [lease for lease in unknown if lease.lease in self._open]

    def free(
        self, driver: Holder, lacking: Mapping[int, list[int]], now: float
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the indices to lease to a driver, each with the stages that lack it.

        First those under no lease, then those that another driver has had for too long, once.
        """
        under: dict[int, list[_Leased]] = {}
        for leased in self._open.values():
            under.setdefault(leased.lease.index, []).append(leased)
        yield from ((i, stages) for i, stages in lacking.items() if i not in under)
        limit_s = FIRST_LEASE_S
        if self._usual_s is not None:
            limit_s = max(LEAST_LEASE_S, LATE * self._usual_s)
        for index, stages in lacking.items():
            late = [x for x in under.get(index, ()) if now - x.since > limit_s]
            if len(under.get(index, ())) == 1 and late and late[0].driver != driver:
                yield index, stages
