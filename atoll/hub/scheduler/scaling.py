"""Changes the minimum and maximum number of members of a running job.

With at most as many members as data slots, members come and go while rounds continue; slots without
a member wait. For more members the data has to be sharded anew: the group saves, stops and
continues from there without losing committed work.
"""

from __future__ import annotations

from atoll.errors import ConfigError
from atoll.hub.jobs.record import Job
from atoll.hub.rounds.service import RoundService
from atoll.hub.scheduler.commands import LaunchCommands
from atoll.hub.stores import Stores
from atoll.wire.states import JobState

MOST_MEMBERS = 10_000

LEAST_GRACE_S, PERIODS_OF_GRACE = 60.0, 3.0
"""Time to finish the round before the data is sharded anew."""


def check_bounds(job: Job, *, least: int, most: int) -> None:
    """Refuse bounds that are not possible.

    Raises:
        ConfigError: says why.
    """
    if job.of_policies:
        raise ConfigError(
            "the members of an [rl] job are its policies and its critic",
            given=f"max {most} for {job.job}",
            expected=f"{job.nodes_wanted}",
            remedy="add a policy from another job that names the same pool in [rl]",
        )
    if not 1 <= most <= MOST_MEMBERS or not 0 <= least <= most:
        raise ConfigError(
            "a job cannot have so many members",
            given=f"min {least}, max {most}",
            expected=f"0 <= min <= max and 1 <= max <= {MOST_MEMBERS}",
        )
    if job.over:
        raise ConfigError(
            "this job has ended",
            given=f"{job.job} is {job.state}",
            expected="a job that waits or runs",
            remedy=f"resume with that number of members: atoll resume {job.job} --nodes {most}",
        )


class Scaling:
    """Changes bounds, and ends members beyond the upper one."""

    def __init__(self, *, stores: Stores, rounds: RoundService, launching: LaunchCommands) -> None:
        self._jobs = stores.jobs
        self._events = stores.events
        self._rounds = rounds
        self._launching = launching

    async def scale(self, job: Job, *, least: int, most: int) -> bool:
        """Store new bounds of a job; return whether its data has to be sharded anew for them.

        Raises:
            ConfigError: it has ended, or there cannot be so many.
        """
        check_bounds(job, least=least, most=most)
        if (job.min_nodes, job.nodes_wanted) == (least, most):
            return False
        sharded = job.state == JobState.RUNNING and not job.silent
        anew = sharded and most > job.slots
        await self._jobs.scale(
            job.job, least=least, most=most, data_slots=job.slots if sharded else most
        )
        if self._rounds.has(job.job):
            runtime = self._rounds.runtime(job.job)
            async with runtime.lock:
                runtime.machine.nodes_wanted, runtime.machine.min_nodes = most, least
        text = f"{least or most} to {most} members from now on"
        if anew:
            text += "; the data is sharded anew: members save, and start again"
        await self._events.add(job.job, "scaled", text)
        return anew

    def grace_s(self, job: Job) -> float:
        """Return the time for members to finish their round before the data is sharded anew."""
        return max(LEAST_GRACE_S, PERIODS_OF_GRACE * (job.measures.period_s or 0.0))

    async def send_away(self, job: Job) -> None:
        """End the members beyond the upper bound, once others hold the state."""
        surplus = [
            member
            for member in job.members.values()
            if member.slot >= job.nodes_wanted and member.live
        ]
        if not surplus or job.stopping:
            return
        working = self._rounds.working(job.job)
        keeps = any(
            member.live and (working is None or member.member in working)
            for member in job.members.values()
            if member.slot < job.nodes_wanted
        )
        for member in surplus if keeps or job.silent else []:
            await self._launching.end(job, member.member)
