"""One job's rounds while the hub lives: where they stand, and which requests wait for what."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import GroupError
from atoll.hub.decisions import JobRounds
from atoll.hub.forming import LEAVING, RECOVERING
from atoll.hub.timeline import Timeline
from atoll.wire.messages import RoundPlan, Verdict

KEPT_VERDICTS = 64

ENDED = "the job has ended"
QUIET = frozenset({ENDED, LEAVING, RECOVERING})
"""Ends of a wait that are nobody's fault."""


@dataclass(eq=False)
class Room:
    """One job's rounds, and who waits for what."""

    machine: JobRounds
    opened_at: float
    """Monotonic time at which this life of the hub took the job up."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from an occurrence until its consequences are durable and told."""
    plans: dict[str, asyncio.Future[RoundPlan]] = field(default_factory=dict)
    votes: dict[int, asyncio.Future[Verdict]] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """The newest verdicts by epoch; older ones are in the database."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """No attempt is open."""
    lost: list[str] = field(default_factory=list)
    """Members of the open plan that were lost, for a reducer that comes back."""
    bytes_before: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    """Where the time goes; decides nothing."""

    @property
    def job(self) -> str:
        """The job."""
        return self.machine.job

    def plan_for(self, member: str) -> asyncio.Future[RoundPlan]:
        """Return what the member waits for in a join; asked again, the same."""
        future = self.plans.get(member)
        if future is None or future.done():
            future = asyncio.get_running_loop().create_future()
            self.plans[member] = future
        return future

    def verdict_on(self, epoch: int) -> asyncio.Future[Verdict]:
        """Return what all voters of an attempt wait for."""
        if epoch not in self.votes:
            self.votes[epoch] = asyncio.get_running_loop().create_future()
        return self.votes[epoch]

    def refuse(self, member: str, error: GroupError) -> None:
        """End the wait of a member in a join."""
        future = self.plans.pop(member, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()

    def keep(self, verdict: Verdict) -> None:
        """Remember a verdict for those who ask again, and answer those who wait."""
        self.verdicts[verdict.epoch] = verdict
        while len(self.verdicts) > KEPT_VERDICTS:
            del self.verdicts[min(self.verdicts)]
        future = self.votes.pop(verdict.epoch, None)
        if future is not None and not future.done():
            future.set_result(verdict)

    def close(self) -> None:
        """End every wait: the job is over."""
        self.decided.set()
        waiting: list[asyncio.Future[Any]] = [*self.plans.values(), *self.votes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GroupError(ENDED, given=self.job))
                future.exception()
