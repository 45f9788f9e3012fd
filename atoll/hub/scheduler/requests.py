"""The places that jobs request, and the remaining capacity of nodes.

Waiting jobs request all their places, running jobs what they lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.hub.jobs.completion import (
    MAX_FAILURES,
    RestartPolicy,
    missing,
    program_failed,
    restarts_exhausted,
)
from atoll.hub.jobs.jobs import Job, Jobs, Member
from atoll.hub.nodes.membership import Membership
from atoll.hub.observability.events import Events
from atoll.hub.rounds.service import RoundService
from atoll.hub.scheduler.assign import WHOLE, Demand, Key
from atoll.hub.scheduler.follower_hosts import (
    follower_failed,
    follower_given_up,
    missing_followers,
    whole_islands,
)
from atoll.hub.scheduler.resources import Capacity, Usage, request_of
from atoll.hub.sessions.session import Sessions
from atoll.ids import follower_id, is_follower, member_id, member_of_follower, slot_of
from atoll.wire.states import JobState, MemberState


class CapacityView:
    """Combines connected nodes, their measured capacity and the resources reserved by jobs."""

    def __init__(self, *, jobs: Jobs, membership: Membership, sessions: Sessions) -> None:
        self._jobs = jobs
        self._membership = membership
        self._sessions = sessions

    def now(self, *, pausing: Collection[tuple[str, str]] = ()) -> list[Capacity]:
        """Return every known node.

        Args:
            pausing: Job and member of processes that will be launched again after a pause; they
                keep their places.
        """
        used: dict[str, Usage] = {}
        for job in self._jobs.list():
            for member in job.processes if job.state == JobState.RUNNING else ():
                if member.live or (job.job, member.member) in pausing:
                    before = used.get(member.node, Usage())
                    want = request_of(job.spec, member=member.member)
                    used[member.node] = before.plus(want.needs, gpus=want.gpus)
        places = []
        for node in self._membership.nodes.values():
            session = self._sessions.get(node.node)
            why = (node.drain_reason or "its owner asked for it") if node.draining else ""
            places.append(
                Capacity(
                    node=node.node,
                    info=node.info,
                    connected=node.connected,
                    draining=why,
                    stats=session.stats if session is not None else node.stats,
                    used=used.get(node.node, Usage()),
                    source=session.source if session is not None else "",
                )
            )
        return places


@dataclass
class Request:
    """Requested places."""

    asks: list[Demand] = field(default_factory=list)
    lacking: dict[Key, list[str]] = field(default_factory=dict)
    """The processes that a running job lacks, the most needed first."""
    pausing: set[tuple[str, str]] = field(default_factory=set)
    """Processes that keep their places during a pause before the next launch."""

    def short_islands(self, granted: Collection[Key]) -> dict[str, list[int]]:
        """Return by job the members that requested machines for their islands and got none."""
        found: dict[str, list[int]] = {}
        for ask in self.asks:
            if ask.running and ask.machines > 1 and ask.key not in granted:
                found.setdefault(ask.key[0], []).append(ask.key[1])
        return found


class PlacementRequests:
    """Collects the requests of all jobs."""

    def __init__(
        self,
        *,
        jobs: Jobs,
        events: Events,
        membership: Membership,
        places: CapacityView,
        rounds: RoundService,
        relaunches: RestartPolicy,
    ) -> None:
        self._jobs = jobs
        self._events = events
        self._membership = membership
        self._places = places
        self._rounds = rounds
        self._relaunches = relaunches

    async def asks(self) -> Request:
        """Return the current requests."""
        requests = Request()
        for number, job in enumerate(self._jobs.list()[::-1]):
            if job.state == JobState.WAITING:
                requests.asks.append(demand_of_all(job, number=number))
            elif job.state == JobState.RUNNING and not job.stopping:
                await self._ask_again(job, requests, number=number)
        return requests

    async def _ask_again(self, job: Job, requests: Request, *, number: int) -> None:
        """Add the requests of a running job: one for each member that lacks processes."""
        lacking = missing_members(job)
        living = LiveProcesses.of(job) if lacking else None
        for slot, names in lacking.items():
            due = []
            for name in names:
                before = job.process(name)
                if before is None or await self._is_due(job, before):
                    due.append(name)
                elif not given_up(before, job):
                    requests.pausing.add((job.job, name))
            if due and living is not None:
                requests.lacking[job.job, slot] = due
                requests.asks.append(demand_of(job, slot, due, number=number, living=living))

    async def _is_due(self, job: Job, process: Member) -> bool:
        """Return whether to launch a missing member or follower again now."""
        if given_up(process, job):
            said = process.failures >= MAX_FAILURES  # already reported, e.g. by an eviction
            if self._relaunches.first_time(job.job, process.member) and not said:
                failed = process.failures + 1
                text = f"{process.node}'s worker is not started again: {failed} starts failed"
                await self._events.add(job.job, "member-given-up", text, member=process.member)
            return False
        node = self._membership.nodes.get(process.node)
        return is_due(
            self._relaunches, job, process, node_is_there=node is not None and node.connected,
            may_return=lambda: self._rounds.may_return(job.job),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LiveProcesses:
    """The live processes of a job, computed once for all its demands."""

    whole: int
    """Members that live with all machines that they need."""
    beside: Mapping[str, int]
    """Live processes by node."""
    there: Mapping[int, Sequence[str]]
    """Nodes of live processes by slot."""

    @classmethod
    def of(cls, job: Job) -> LiveProcesses:
        """Compute it from the job's record."""
        there: dict[int, list[str]] = {}
        for process in job.processes:
            if process.live:
                there.setdefault(process.slot, []).append(process.node)
        return cls(
            whole=whole_islands(job, shrinks=job.spec.island.may_shrink), there=there,
            beside=Counter(node for nodes in there.values() for node in nodes),
        )  # fmt: skip


def demand_of_all(job: Job, *, number: int) -> Demand:
    """Return the request of a job that has not started; `number` is its order of submission."""
    return Demand(
        key=(job.job, WHOLE), want=request_of(job.spec), machines=job.machines,
        least=(job.min_nodes or job.nodes_wanted) * job.machines,
        most=job.nodes_wanted * job.machines, priority=job.spec.job.priority, number=number,
    )  # fmt: skip


def demand_of(
    job: Job, slot: int, names: Sequence[str], *, number: int, living: LiveProcesses
) -> Demand:
    """Return the request for a member of a running job that lacks these processes."""
    before = job.process(names[0])
    return Demand(
        key=(job.job, slot), want=request_of(job.spec, member=names[0]), machines=job.machines,
        least=1 if job.spec.island.may_shrink else len(names), most=len(names),
        priority=job.spec.job.priority, number=number,
        essential=living.whole < max(1, job.min_nodes),
        avoid=before.node if before is not None else "",
        beside=living.beside, there=tuple(living.there.get(slot, ())),
    )  # fmt: skip


def is_due(
    relaunches: RestartPolicy,
    job: Job,
    process: Member,
    *,
    node_is_there: bool,
    may_return: Callable[[], bool],
) -> bool:
    """Return whether a process that is not given up is launched again now.

    Args:
        relaunches: Remembers since when it is missing.
        job: Its job.
        process: A member or follower that has been launched and does not live.
        node_is_there: Its node is connected.
        may_return: Whether all members that have the state are lost; see `RestartPolicy.due`.
    """
    return relaunches.due(
        job.job, process, node_is_there=node_is_there,
        may_return=not is_follower(process.member) and may_return(),
        silent=may_live_unheard(job, process), program=failed_itself(process, job),
    )  # fmt: skip


def missing_members(job: Job) -> dict[int, list[str]]:
    """Return by slot the processes that a running job lacks: members before their followers."""
    found = {slot: [str(member_id(slot))] for slot in missing(job)}
    for follower in missing_followers(job):
        found.setdefault(slot_of(member_of_follower(follower)[0]), []).append(follower)
    return found


def failed_itself(process: Member, job: Job) -> bool:
    """Return whether a process ended by a fault of the job's own program."""
    if is_follower(process.member):
        return follower_failed(process)
    return program_failed(process, trainer=job.kind == "trainer")


def part_names(slot: int, *, machines: int) -> list[str]:
    """Return all processes of a member: itself, and its followers."""
    return [member_id(slot), *(follower_id(slot, part) for part in range(1, machines))]


def given_up(process: Member, job: Job) -> bool:
    """Return whether a process has failed so often that it is not launched again."""
    return (
        follower_given_up(process, job)
        if is_follower(process.member)
        else restarts_exhausted(process, job)
    )


def may_live_unheard(job: Job, process: Member) -> bool:
    """Return whether a process may still run although its node is disconnected.

    A follower is assumed to run while its island does.
    """
    if not is_follower(process.member):
        return job.silent
    member = job.members.get(member_id(process.slot))
    return member is not None and member.state == MemberState.RUNNING
