"""Hands: what islands run on their further machines. No members, so rounds know nothing of them.

A hand is launched where its member's island lacks a machine, lives while its member is wanted, and
is ended after it. One that cannot be had ends its member, with the reason; what a lost one means
for the ranks beside it is the business of the island itself.
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
    missing,
    program_failed,
    restarts_exhausted,
)
from atoll.hub.jobs.jobs import Job, Jobs, Member
from atoll.hub.nodes.membership import Membership
from atoll.hub.observability.events import Events
from atoll.hub.scheduler.commands import LaunchCommands
from atoll.hub.scheduler.rendezvous import RendezvousRegistry
from atoll.ids import follower_id, member_id
from atoll.wire.states import MemberState

GIVE_WAY_S = 10.0
"""How long several islands of a job wait for machines before one gives up those that it has."""


def wanted_followers(job: Job) -> list[str]:
    """Return the hands of all members that live or will be launched again, in their order."""
    if job.machines == 1:
        return []
    slots = {member.slot for member in job.members.values() if member.live}
    for slot in missing(job) if not job.stopping else []:
        member = job.members.get(member_id(slot))
        if member is None or not restarts_exhausted(member, job):
            slots.add(slot)
    return [follower_id(slot, part) for slot in sorted(slots) for part in range(1, job.machines)]


def missing_followers(job: Job) -> list[str]:
    """Return the hands that are to be launched, of those that do not live."""
    if any(member.state == MemberState.DONE for member in job.members.values()):
        return []  # the work of those that train together is done
    return [name for name in wanted_followers(job) if not _lives(job.followers.get(name))]


def follower_failed(follower: Member) -> bool:
    """Return whether a hand came to its end by a fault of the job's own program."""
    return program_failed(follower, trainer=True)  # bare exits are a fault of its keeper's machine


def follower_given_up(follower: Member, job: Job) -> bool:
    """Return whether a hand is not launched again, and its member neither."""
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
    """Return how many members live and have all machines that they need to work."""
    live = [member for member in job.members.values() if member.live]
    if shrinks:
        return len(live)
    parts = range(1, job.machines)
    return sum(
        all(_lives(job.followers.get(follower_id(m.slot, part))) for part in parts) for m in live
    )


class FollowerHosts:
    """Ends the hands of all running jobs when they are not wanted, and members without hands."""

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
        """Monotonic time since when several islands of a job lack machines that are nowhere."""

    async def look_after(self, job: Job) -> None:
        """See what follows from what became of members and hands of a running job."""
        if job.machines == 1 and not job.followers:
            return
        wanted = set(wanted_followers(job))
        for follower in list(job.followers.values()):
            if follower.live and follower.member not in wanted:
                await self._launching.end(job, follower.member)
            elif self._relaunches.steady(job.job, follower):
                await self._jobs.update_member(job.job, follower.member, failures=0, retried=0)
            elif follower.member in wanted and follower_given_up(follower, job):
                await self._give_up(job, follower)

    async def _give_up(self, job: Job, follower: Member) -> None:
        """End the member whose island cannot have all its machines, with the reason."""
        told = _named(follower)
        if follower.error != told:
            await self._jobs.update_member(job.job, follower.member, error=told)
        member = job.members.get(member_id(follower.slot))
        if member is not None and member.live:
            await self._launching.end(job, member.member)
        await self._membership.fail(job.job, member_id(follower.slot), error=told)

    async def give_way(self, short: Mapping[str, Collection[int]]) -> None:
        """Let one of several islands that wait for machines give up those that it has.

        Two islands that lost a machine each would wait for ever where one could work.

        Args:
            short: Job -> slots of its members whose islands asked for places and got none.
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
            text = f"the machines of {member_id(slot)} go to islands that lack fewer"
            await self._events.add(name, "island-gives-way", text, member=member_id(slot))
            for process in working:
                if process.slot == slot:
                    await self._launching.end(job, process.member)

    async def end_all(self, job: Job) -> None:
        """End the hands of a job that has ended."""
        for follower in list(job.followers.values()):
            if follower.live:
                await self._launching.end(job, follower.member)
                await self._jobs.update_member(job.job, follower.member, state=MemberState.STOPPED)
        self.rendezvous.forget(job.job)


def _lives(follower: Member | None) -> bool:
    return follower is not None and follower.live


def _named(follower: Member) -> dict[str, Any]:
    """Return the error of a hand, which says whose it is."""
    where = f"{follower.member} on {follower.node}: "
    error = follower.error or {
        "kind": "JobError", "what": f"ended {follower.failures + 1} times in a row",
        "given": f"exit status {follower.exit_code}",
    }  # fmt: skip
    what = error.get("what", "it failed")
    return {**error, "what": what if what.startswith(where) else where + what}
