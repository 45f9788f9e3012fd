"""Followers: the supervisors on an island's second and further machines.

They are not members, so rounds do not know them. A follower is launched where its member's island
lacks a machine, and ended with its member. If it cannot be launched, its member fails with the
reason; a lost follower is handled by the island itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from atoll.clock import Clock
from atoll.hub.jobs.completion import (
    FATAL_KINDS,
    MAX_FAILURES,
    RestartPolicy,
    failures_after,
    is_finished,
    missing,
    program_failed,
    restarts_exhausted,
)
from atoll.hub.jobs.jobs import Job, Jobs, Member
from atoll.hub.nodes.membership import Membership
from atoll.hub.observability.events import Events
from atoll.hub.scheduler.commands import LaunchCommands
from atoll.hub.scheduler.rendezvous import RendezvousRegistry
from atoll.ids import follower_id, member_id, member_of_follower
from atoll.wire.states import MemberState

GIVE_WAY_S = 10.0
"""How long several islands of a job wait for machines before one releases its own."""


def wanted_followers(job: Job) -> list[str]:
    """Return the followers of all members that live or will be launched again, in order."""
    if job.machines == 1:
        return []
    slots = {member.slot for member in job.members.values() if member.live}
    for slot in missing(job) if not job.stopping else []:
        member = job.members.get(member_id(slot))
        if member is None or not restarts_exhausted(member, job):
            slots.add(slot)
    return [follower_id(slot, part) for slot in sorted(slots) for part in range(1, job.machines)]


def missing_followers(job: Job) -> list[str]:
    """Return the followers to launch, among those that do not live."""
    finished = {m.member for m in job.members.values() if is_finished(m, job)}
    return [
        name
        for name in wanted_followers(job)
        if not _lives(job.followers.get(name)) and member_of_follower(name)[0] not in finished
    ]


def follower_failed(follower: Member) -> bool:
    """Return whether a follower ended by a fault of the job's own program."""
    return program_failed(
        follower, trainer=True
    )  # an exit without an error is a fault of its machine


def follower_given_up(follower: Member, job: Job) -> bool:
    """Return whether a follower, and therefore its member, is not launched again."""
    if follower.live:
        return False
    if (
        follower.state == MemberState.FAILED
        and (follower.error or {}).get("kind", "") in FATAL_KINDS
    ):
        return True
    if follower_failed(follower) and follower.retried >= job.spec.job.retries:
        return True
    return failures_after(follower) >= MAX_FAILURES


def whole_islands(job: Job, *, shrinks: bool) -> int:
    """Return how many members live with all machines that they need."""
    live = [member for member in job.members.values() if member.live]
    if shrinks:
        return len(live)
    parts = range(1, job.machines)
    return sum(
        all(_lives(job.followers.get(follower_id(m.slot, part))) for part in parts) for m in live
    )


class FollowerHosts:
    """Ends followers that are no longer wanted, and members that lack followers."""

    def __init__(
        self,
        *,
        jobs: Jobs,
        membership: Membership,
        launching: LaunchCommands,
        relaunches: RestartPolicy,
        events: Events,
        clock: Clock,
    ) -> None:
        self._jobs = jobs
        self._events = events
        self._clock = clock
        self._membership = membership
        self._launching = launching
        self._relaunches = relaunches
        self.rendezvous = RendezvousRegistry()
        self._short_since: dict[str, float] = {}
        """Monotonic time since when several islands of a job lack machines."""

    async def look_after(self, job: Job) -> None:
        """Act on the present states of members and followers of a running job."""
        if job.machines == 1 and not job.followers:
            return
        wanted = set(wanted_followers(job))
        for follower in list(job.followers.values()):
            if follower.live and follower.member not in wanted:
                await self._launching.end(job, follower.member)
            elif self._relaunches.steady(job.job, follower):
                await self._jobs.members.update(job.job, follower.member, failures=0, retried=0)
            elif follower.member in wanted and follower_given_up(follower, job):
                await self._give_up(job, follower)

    async def _give_up(self, job: Job, follower: Member) -> None:
        """End the member of an island that cannot get all its machines, with the reason."""
        error = _named(follower)
        if follower.error != error:
            await self._jobs.members.update(job.job, follower.member, error=error)
        member = job.members.get(member_id(follower.slot))
        if member is not None and member.live:
            await self._launching.end(job, member.member)
        await self._membership.fail(job.job, member_id(follower.slot), error=error)

    async def give_way(self, short: Mapping[str, Collection[int]]) -> None:
        """Break a deadlock between islands that each wait for machines: one releases its own.

        Args:
            short: Job -> slots of its members whose islands requested places and got none.
        """
        self._short_since = {job: at for job, at in self._short_since.items() if job in short}
        for name, slots in short.items():
            job = self._jobs.get(name)
            working = [process for process in job.processes if process.live]
            live = Counter(process.slot for process in working)
            broken = [slot for slot in slots if live[slot]]
            if len(broken) < 2:
                self._short_since.pop(name, None)
                continue
            now = self._clock.monotonic()
            if now < self._short_since.setdefault(name, now) + GIVE_WAY_S:
                continue
            del self._short_since[name]
            slot = min(broken, key=lambda slot: (live[slot], -slot))
            text = f"the machines of {member_id(slot)} are given to islands that need fewer"
            await self._events.add(name, "island-gives-way", text, member=member_id(slot))
            for process in working:
                if process.slot == slot:
                    await self._launching.end(job, process.member)

    async def end_all(self, job: Job) -> None:
        """End the followers of a job that has ended."""
        for follower in list(job.followers.values()):
            if follower.live:
                await self._launching.end(job, follower.member)
                if follower.live:  # it may have ended meanwhile
                    await self._jobs.members.stopped(job.job, follower.member)
        self.rendezvous.forget(job.job)


def _lives(follower: Member | None) -> bool:
    return follower is not None and follower.live


def _named(follower: Member) -> dict[str, Any]:
    """Return the error of a follower, with its name."""
    where = f"{follower.member} on {follower.node}: "
    error = follower.error or {
        "kind": "JobError", "what": f"ended {follower.failures + 1} times in a row",
        "given": f"exit status {follower.exit_code}",
    }  # fmt: skip
    what = error.get("what", "it failed")
    return {**error, "what": what if what.startswith(where) else where + what}
