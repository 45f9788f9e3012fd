"""A driver: takes its leased microbatches through all stages, over the members that are there.

Like the round machine, the driver does nothing itself: each method processes one event and returns
effects, in order. The training loop of a member of stage 0 calls it and carries the effects out:

    effects = driver.leased(lease, now)      # an answer to `SwarmWant`
    effects = driver.peers(news.peers, now)  # a newer table in `SwarmNews`
    effects = driver.handed(report, now)     # from a member of a path, or from the own stage
    effects = driver.broken(report, now)     # the same; also of the own sending
    effects = driver.tick(now)               # at `driver.next_deadline()`
    effects = driver.counted(shares, step=step)  # newer shares of the own stage in `SwarmNews`
    driver.answered(lease)                   # `SwarmDone` was answered
    driver.stepped(step)                     # the step is over, or everything was dropped

The walk of a microbatch is Begin -> Handed (stage 0, forward) -> ... -> Handed (last stage) -> ...
-> Handed (first of `stages`, backward) -> Finished. If a member fails, the nearest member before
it that still holds its input computes on over another path (`ResumeAt`, or `Begin` if that is the
driver), under a new attempt.
An evaluation ends with Handed (last stage). No member keeps anything of it, so after a failure it
begins again, over another path.
A late member is bypassed the same way, but not banned, and asked again if there is no other. A
stage without a usable member lets the microbatch wait for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from atoll.swarm.routing import BACKWARD, BOTH, EMA, StageRouter
from atoll.wire.swarm import (
    Broken,
    Handed,
    HeldOutSum,
    Holder,
    Release,
    Resume,
    Share,
    SwarmDone,
    SwarmFailure,
    SwarmLease,
    SwarmPeer,
    Work,
)

FIRST_HOP_S = 60.0
"""Time limit of a member's part while no such part was measured: it may compile its model."""
RETRY_S = 1.0
"""Pause before looking again for a member of a stage without any that is usable."""
LATE = 4.0
"""A member is late after this many times its usual time."""
LEAST_HOP_S = 5.0
"""Least time limit. The death of a member is known from the table sooner, and one that only has a
queue is not bypassed: that would add work where there is too much already."""


@dataclass(frozen=True)
class Begin:
    """Compute the forward pass of the own stage, from the data, and send it to `work.path[1]`.

    Also after a failure, under a later attempt. With a single stage: compute both passes, and
    report `Handed(stage=0, backward=True)`.
    """

    work: Work


@dataclass(frozen=True)
class ResumeAt:
    """Send `order` to `to`, a member of a later stage."""

    to: Holder
    order: Resume


@dataclass(frozen=True)
class Finished:
    """Report to the ledger, until it is answered; then call :meth:`Driver.answered`."""

    report: SwarmDone


@dataclass(frozen=True)
class ReleaseAt:
    """Send `order` to all of `to`, best effort; the own member may be among them."""

    to: tuple[Holder, ...]
    order: Release


Effect = Begin | ResumeAt | Finished | ReleaseAt


@dataclass
class _Flight:
    """A microbatch on its way."""

    lease: SwarmLease
    work: Work
    awaited: int = 0
    """Rank of the report that comes next, see :meth:`Driver._rank`."""
    since: float = 0.0
    deadline: float = 0.0
    waits: int | None = None
    """Stage of the holder to go on from once all later stages have a usable member."""
    late: set[Holder] = field(default_factory=set)
    touched: set[Holder] = field(default_factory=set)
    """Members that may keep inputs of it."""
    finished: bool = False
    held_out: HeldOutSum | None = None


class Driver:
    """The microbatches of one member of stage 0; see the module's docstring."""

    def __init__(self, me: Holder, *, stages: int, rows: int, random: Random) -> None:
        """Start without microbatches; `rows` is the number of rows of each."""
        self.me, self.stages, self.rows = me, stages, rows
        self.routers = [StageRouter(random) for _ in range(stages)]
        self._flights: dict[int, _Flight] = {}
        self._hop_s: dict[tuple[Holder, bool], float] = {}
        self._queues: dict[str, float] = {}
        self._failures: list[SwarmFailure] = []

    def failures(self) -> list[SwarmFailure]:
        """Return the members that failed since the last call."""
        found, self._failures = self._failures, []
        return found

    @property
    def holding(self) -> list[int]:
        """The leases in flight, for `SwarmWant`."""
        return list(self._flights)

    def next_deadline(self) -> float | None:
        """Return when :meth:`tick` is due, if anything is in flight."""
        return min((f.deadline for f in self._flights.values() if not f.finished), default=None)

    # ------------------------------------------------------------------------- events

    def leased(self, lease: SwarmLease, now: float) -> list[Effect]:
        """The ledger has leased a microbatch to this member; a repeated lease is ignored."""
        if lease.lease in self._flights:
            return []
        work = Work(lease.step, lease.index, lease.lease, 0, [self.me], lease.stages)
        flight = self._flights[lease.lease] = _Flight(lease, work)
        return self._go_on(flight, 0, now)

    def peers(self, table: Iterable[SwarmPeer], now: float) -> list[Effect]:
        """A newer table: go on around members that are lost, over those that are new."""
        table = list(table)
        for stage, router in enumerate(self.routers):
            router.update(peer for peer in table if peer.stage == stage)
        known = {peer.holder for peer in table}
        self._hop_s = {hop: s for hop, s in self._hop_s.items() if hop[0] in known}
        names = {peer.member for peer in table}
        self._queues = {name: n for name, n in self._queues.items() if name in names}
        effects: list[Effect] = []
        for flight in self._open():
            lost = [s for s in self._needed(flight) if flight.work.path[s] not in known]
            if flight.waits is not None:
                effects += self._go_on(flight, flight.waits, now)
            elif lost and min(lost) > 0:
                effects += self._go_on(flight, min(lost) - 1, now)
        return effects

    def handed(self, report: Handed, now: float) -> list[Effect]:
        """A member of the path has computed its part, and the next one has what it sent."""
        flight = self._current(report)
        if flight is None or not 0 <= report.stage < self.stages:
            return []
        holder = flight.work.path[report.stage]
        last = report.stage == self.stages - 1
        work = 1.0 if not report.backward else BOTH if last else BACKWARD
        self.routers[report.stage].measured(holder, self.rows, report.seconds, work=work)
        self._queues[holder.member] = report.queue
        rank = self._rank(report.stage, backward=report.backward)
        if rank < flight.awaited:
            return []
        if rank == flight.awaited:
            hop, hop_s = (holder, report.backward), now - flight.since
            usual = self._hop_s.get(hop, hop_s)
            self._hop_s[hop] = (1 - EMA) * usual + EMA * hop_s
        if rank == self._rank(self._end(flight), backward=True):
            flight.held_out = report.held_out
            return self._finish(flight)
        flight.awaited = rank + 1
        self._wait(flight, now)
        return []

    def broken(self, report: Broken, now: float) -> list[Effect]:
        """A member of the path failed (it is banned), or has no room (it is bypassed)."""
        flight = self._current(report)
        if flight is None or not 0 <= report.stage < self.stages or flight.waits is not None:
            return []
        holder = flight.work.path[report.stage]
        if report.busy:
            flight.late.add(holder)
        elif report.stage > 0:
            banned_s = self.routers[report.stage].ban(holder, now)
            self._failures.append(SwarmFailure(holder.member, report.reason[:200], banned_s))
        return self._go_on(flight, max(0, report.stage - 1), now)

    def counted(self, shares: Sequence[Share], *, step: int) -> list[Effect]:
        """Shares of the own stage and a step: give up what another lease has brought through."""
        by_index = {share.index: share.lease for share in shares if share.member}
        effects: list[Effect] = []
        for flight in self._open():
            lease = flight.lease
            other = by_index.get(lease.index, lease.lease) != lease.lease
            if other and lease.step == step and 0 in lease.stages:
                effects.append(self._release(flight, drop=True))
                del self._flights[lease.lease]
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Bypass members that are late, and look again for members of stages without any."""
        effects: list[Effect] = []
        for flight in self._open():
            if now < flight.deadline:
                continue
            if flight.waits is not None:
                effects += self._go_on(flight, flight.waits, now)
                continue
            stage = self._stage(flight.awaited)
            holder = flight.work.path[stage]
            if flight.awaited == 0:
                self._wait(flight, now)  # its own forward pass takes that long
                continue
            # Without a substitute the same member is asked again: a message may be lost.
            if stage > 0:
                flight.late.add(holder)
            effects += self._go_on(flight, max(0, stage - 1), now)
        return effects

    def answered(self, lease: int) -> None:
        """The ledger has answered the report of a finished microbatch."""
        self._flights.pop(lease, None)

    def stepped(self, step: int) -> None:
        """The job is at this step: microbatches of earlier ones are over."""
        self._flights = {n: f for n, f in self._flights.items() if f.lease.step >= step}

    # ---------------------------------------------------------------------------- paths

    def _go_on(self, flight: _Flight, held: int, now: float) -> list[Effect]:
        """Choose the path after stage `held`, or after an earlier holder that is still there."""
        old = flight.work
        path = old.path
        held = 0 if old.evaluates else held
        while held > 0 and (path[held] in flight.late or not self._usable(path[held], held, now)):
            held -= 1
        later = range(held + 1, self.stages)
        if not all(self._choice(stage, flight, now) for stage in later):
            flight.late.clear()  # better a late member than none
        if not all(self._choice(stage, flight, now) for stage in later):
            flight.waits, flight.deadline = held, now + RETRY_S
            return []
        chosen = [self.routers[s].choose(self.rows, now, avoid=flight.late) for s in later]
        new = [*path[: held + 1], *(holder for holder in chosen if holder is not None)]
        work = Work(old.step, old.index, old.lease, old.attempt + 1, new, old.stages)
        flight.work, flight.waits = work, None
        flight.touched.update(new)
        flight.awaited = held
        self._wait(flight, now)
        return [ResumeAt(new[held], Resume(work, held))] if held else [Begin(work)]

    def _choice(self, stage: int, flight: _Flight, now: float) -> set[Holder]:
        return set(self.routers[stage].usable(now)) - flight.late

    def _usable(self, holder: Holder, stage: int, now: float) -> bool:
        return holder in self.routers[stage].usable(now)

    def _finish(self, flight: _Flight) -> list[Effect]:
        flight.finished = True
        lease, path = flight.lease, flight.work.path
        speeds: dict[str, float] = {}
        for stage, holder in enumerate(path):
            speeds |= {m: s for m, s in self.routers[stage].speeds().items() if m == holder.member}
        evaluates = flight.work.evaluates
        report = SwarmDone(
            lease.step,
            lease.index,
            lease.lease,
            stages=list(lease.stages),
            holders=[path[-1]] if evaluates else [path[stage] for stage in lease.stages],
            queues={h.member: self._queues[h.member] for h in path if h.member in self._queues},
            row_s=speeds,
            held_out=flight.held_out,
        )
        return [Finished(report), *([] if evaluates else [self._release(flight)])]

    def _release(self, flight: _Flight, *, drop: bool = False) -> ReleaseAt:
        lease = flight.lease
        order = Release(lease.step, lease.index, lease.lease, drop=drop)
        return ReleaseAt(tuple(sorted(flight.touched)), order)

    # ------------------------------------------------------------------- the walk in ranks

    def _rank(self, stage: int, *, backward: bool) -> int:
        """Return the place of a report in the walk; the last stage has one for both passes."""
        return 2 * (self.stages - 1) - stage if backward else stage

    def _end(self, flight: _Flight) -> int:
        """Return the stage with the last report: the first that counts, or the last of all."""
        return min(flight.lease.stages, default=self.stages - 1)

    def _stage(self, rank: int) -> int:
        return min(rank, 2 * (self.stages - 1) - rank)

    def _needed(self, flight: _Flight) -> list[int]:
        """Return the stages whose member still has to do something, on either way."""
        first = self._end(flight)
        last_ranks = {s: self._rank(s, backward=s >= first) for s in range(len(flight.work.path))}
        return [s for s, rank in last_ranks.items() if rank >= flight.awaited]

    def _wait(self, flight: _Flight, now: float) -> None:
        stage = self._stage(flight.awaited)
        holder = flight.work.path[stage]
        back = flight.awaited >= self.stages - 1 and not flight.work.evaluates
        usual = self._hop_s.get((holder, back), self._hop_s.get((holder, True)))
        limit_s = FIRST_HOP_S if usual is None else max(LEAST_HOP_S, LATE * usual)
        # All members may be slow at once: bypassing them again and again would only add work.
        limit_s *= 2.0 ** min(3, flight.work.attempt - 1)
        flight.since, flight.deadline = now, now + limit_s

    def _open(self) -> list[_Flight]:
        return [flight for flight in self._flights.values() if not flight.finished]

    def _current(self, report: Handed | Broken) -> _Flight | None:
        flight = self._flights.get(report.lease)
        if flight is None or flight.finished or report.attempt != flight.work.attempt:
            return None
        return flight
