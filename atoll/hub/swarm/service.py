"""Hosts the ledgers of SWARM jobs: waits with the requests of members until there are news.

Nothing is written to disk. A ledger begins with the first announcement that this hub process gets
of a job, and takes over what members report until all live ones are back or `RETURN_S` has passed;
at the start of a job no member has anything to report, and that is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from atoll.clock import Clock
from atoll.config import JobSpec
from atoll.errors import HubError
from atoll.hub.jobs.jobs import Job, Jobs
from atoll.hub.observability.events import Events
from atoll.hub.rounds.groups import Meeting
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.wire.messages import Verdict
from atoll.wire.states import JobState
from atoll.wire.swarm import (
    SwarmAnnounce,
    SwarmDone,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)

T = TypeVar("T")

RETURN_S = 15.0
"""Time for members to announce themselves to a new ledger, e.g. after a restart of the hub."""

POLL_S = 5.0
"""A request without news is answered after this long, so that none stays open for a lost member."""


@dataclass(eq=False)
class SwarmRuntime:
    """One job's ledger, and the requests that wait for its next change."""

    job: str
    ledger: Ledger
    paused: str = ""
    """Why it waits, as last reported."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Let waiting requests look again."""
        self.changed.set()
        self.changed = asyncio.Event()


def settings_of(spec: JobSpec) -> SwarmSettings:
    """Return the part of a job that its ledger needs."""
    swarm = spec.swarm
    return SwarmSettings(
        swarm.stages,
        swarm.microbatches,
        agrees=spec.meets_every_step,
        rebalance_s=swarm.rebalance_s,
    )


class SwarmService:
    """Handles the requests of members of SWARM jobs."""

    def __init__(
        self, *, jobs: Jobs, events: Events, clock: Clock, live: Callable[[str], list[str]]
    ) -> None:
        """`live` returns the members of a job whose processes were launched and did not end."""
        self._jobs, self._events, self._clock, self._live = jobs, events, clock, live
        self._runtimes: dict[str, SwarmRuntime] = {}

    def ledger(self, job: str) -> Ledger:
        """Return the ledger of a running job; raises HubError if it is no SWARM."""
        return self._runtime(job).ledger

    # ------------------------------------------------------------------ requests of members

    async def announce(self, job: str, member: str, body: SwarmAnnounce) -> SwarmPlace:
        """Give a member its place; see :meth:`Ledger.announce`."""
        runtime = self._runtime(job)
        place = runtime.ledger.announce(member, body, self._clock.monotonic())
        await self._after(runtime)
        return place

    async def want(self, job: str, member: str, body: SwarmWant) -> SwarmLeases:
        """Lease microbatches to a driver, as soon as there are any."""
        runtime = self._runtime(job)

        def look() -> SwarmLeases | None:
            leases = runtime.ledger.want(member, body, self._clock.monotonic())
            return leases if leases.leases else None

        return await self._when(runtime, look) or SwarmLeases([])

    async def done(self, job: str, body: SwarmDone) -> None:
        """Count a microbatch."""
        runtime = self._runtime(job)
        runtime.ledger.done(body, self._clock.monotonic())
        await self._after(runtime)

    async def watch(self, job: str, member: str, body: SwarmWatch) -> SwarmNews:
        """Return what a member does not know yet, as soon as there is anything."""
        runtime = self._runtime(job)

        def look() -> SwarmNews | None:
            return runtime.ledger.news(member, body, self._clock.monotonic())

        quiet = SwarmNews(body.step, closing=body.closing, table=body.table)
        return await self._when(runtime, look) or quiet

    # ------------------------------------------------------------------------------- events

    def groups(self, job: Job) -> int:
        """Return the stages of a SWARM, whose members meet by stage."""
        return job.spec.swarm.stages

    def group_of(self, job: str, member: str) -> int:
        """Return the stage that a member serves; -1: none at present."""
        runtime = self._runtimes.get(job)
        return runtime.ledger.stage_of(member) if runtime is not None else -1

    def meeting(self, job: str, group: int) -> Meeting:
        """Return the members of a stage, and those without which its round would lose a share."""
        runtime = self._runtimes.get(job)
        if runtime is None:
            return Meeting(-1, frozenset(), frozenset())
        ledger = runtime.ledger
        members = frozenset(m.holder.member for m in ledger.serving(group))
        if not ledger.settings.agrees:
            return Meeting(0, members, frozenset())
        count = ledger.counts[group]
        if not count.closing or count.agreed_by:
            return Meeting(-1, members, frozenset())
        return Meeting(count.closing, members, frozenset(ledger.required(group)), ledger.step)

    def committed(self, job: str, verdict: Verdict, closing: int) -> None:
        """The members of a stage have met: they hold its mean."""
        runtime = self._runtimes.get(job)
        if runtime is not None and runtime.ledger.settings.agrees:
            now, members = self._clock.monotonic(), verdict.contributors
            runtime.ledger.agreed(verdict.group, verdict.round, members, now, closing=closing)
            runtime.wake()

    def gone(self, job: str, member: str) -> None:
        """A process has ended, or is leaving: what it alone held is leased again."""
        runtime = self._runtimes.get(job)
        if runtime is not None:
            runtime.ledger.lost(member, self._clock.monotonic())
            runtime.wake()

    async def tick(self) -> None:
        """Process what only time brings, and forget ended jobs."""
        for job, runtime in list(self._runtimes.items()):
            record = self._jobs.find(job)
            if record is None or record.state != JobState.RUNNING:
                self._runtimes.pop(job).wake()
                continue
            runtime.ledger.tick(self._clock.monotonic())
            await self._after(runtime)

    async def _after(self, runtime: SwarmRuntime) -> None:
        """Tell everyone who waits, and people about moves and pauses."""
        runtime.wake()
        moves, runtime.ledger.moved = runtime.ledger.moved, []
        for move in moves:
            text = f"{move.member} moves from stage {move.source} to stage {move.target}"
            await self._events.add(runtime.job, "stage-moved", text, member=move.member)
        paused = runtime.ledger.paused()
        if paused != runtime.paused:
            runtime.paused = paused
            kind, text = ("paused", f"paused: {paused}") if paused else ("unpaused", "continues")
            await self._events.add(runtime.job, kind, text)

    async def _when(self, runtime: SwarmRuntime, look: Callable[[], T | None]) -> T | None:
        """Return what `look` finds, now or after a change; None after `POLL_S`."""
        deadline = self._clock.monotonic() + POLL_S
        while True:
            changed = runtime.changed
            found = look()
            left_s = deadline - self._clock.monotonic()
            ended = self._runtimes.get(runtime.job) is not runtime
            if found is not None or left_s <= 0 or ended:
                return found
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                return None

    def _runtime(self, job: str) -> SwarmRuntime:
        runtime = self._runtimes.get(job)
        if runtime is not None:
            return runtime
        record = self._jobs.get(job)
        if record.state != JobState.RUNNING or not record.spec.swarm.stages:
            raise HubError(
                "this job does not train as a SWARM",
                given=job,
                expected='a running job with inner = "swarm"',
            )
        ledger = Ledger(
            settings_of(record.spec),
            step=record.start_round,
            # Numbers of an earlier ledger must not come again; it counted at most one per message.
            first_number=int(self._clock.wall() * 1000),
            expected=self._live(job),
            rebuild_until=self._clock.monotonic() + RETURN_S,
        )
        runtime = self._runtimes[job] = SwarmRuntime(job, ledger)
        return runtime
