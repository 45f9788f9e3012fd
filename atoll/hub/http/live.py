"""Implements `LiveHub` on the hub's sessions, membership and scheduler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from atoll.hub.http.views import describe_member, describe_node
from atoll.hub.nodes.services import JobServices
from atoll.hub.scheduler.scheduler import Scheduler
from atoll.ids import session_id
from atoll.wire.states import JobState


class HubFacade:
    """See :class:`atoll.hub.http.context.LiveHub`."""

    def __init__(self, services: JobServices, scheduler: Scheduler) -> None:
        self._stores = services.stores
        self._sessions = services.sessions
        self._membership = services.membership
        self._scheduler = scheduler
        self._rounds = services.rounds
        self._swarm, self._paths = services.swarm, services.paths
        self._clock = services.clock

    def nodes(self) -> list[dict[str, Any]]:
        """Return every node that joined since the hub started."""
        now = self._clock.monotonic()
        processes: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for job in self._stores.jobs.list():
            for member in job.processes if job.state == JobState.RUNNING else ():
                if member.live:
                    processes[member.node].append((job.job, member.member))
        views = []
        for node in self._membership.nodes.values():
            running = processes[node.node]
            view = describe_node(
                node,
                self._sessions.get(node.node),
                now,
                running=[session_id(*pair) for pair in running],
                measured=[self._measured(*pair) for pair in running],
                traffic=self._stores.metrics.traffic.of_node(node.node),
            )
            views.append(view)
        return views

    def members(self, job: str) -> dict[str, dict[str, Any]]:
        """Return what is known of each member beyond the job's record."""
        now = self._clock.monotonic()
        return {
            member: describe_member(
                self._sessions.get(session_id(job, member)),
                now,
                traffic=self._stores.metrics.traffic.of_member(job, member),
            )
            | self._rounds.describe(job, member)
            for member in self._stores.jobs.get(job).members
        }

    def swarm(self, job: str) -> dict[str, Any] | None:
        """Return what people see of a SWARM."""
        found = self._swarm.view(job)
        return found.figures() if found is not None else None

    def paths(self, job: str) -> dict[str, Any] | None:
        """Return what people see of a job's paths."""
        found = self._paths.view(job, self._stores.metrics.latest(job))
        return found.figures() if found is not None else None

    async def rounds(self, job: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Return decided attempts of rounds, oldest first."""
        return await self._rounds.store.history(job, after=after, limit=limit)

    async def submit(self, job: str) -> None:
        """Schedule a new job, or leave it waiting."""
        await self._scheduler.submit(job)

    async def stop(self, job: str, *, grace_s: float) -> None:
        """Stop a job."""
        await self._scheduler.stop(job, grace_s=grace_s)

    async def scale(self, job: str, *, least: int, most: int) -> None:
        """Change the bounds on a job's members."""
        await self._scheduler.scale(job, least=least, most=most)

    async def resume(self, job: str, *, spec: str = "", checkpoint: int | None = None) -> str:
        """Resume a job from a checkpoint, optionally with a changed job file."""
        async with self._stores.jobs.reviving:
            return await self._scheduler.resume(job, spec=spec, checkpoint=checkpoint)

    def relay(self) -> dict[str, float]:
        """Return the counters of the relay."""
        relay = self._sessions.relay
        return {
            "frames": relay.frames,
            "bytes": relay.bytes,
            "dropped": relay.dropped,
            "sessions": len(self._sessions),
        }

    def _measured(self, job: str, member: str) -> dict[str, float]:
        latest = self._stores.metrics.latest(job).get(member)
        return latest.values if latest else {}
