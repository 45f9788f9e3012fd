"""What the REST interface and the dashboard ask of the living half of the hub."""

from __future__ import annotations

from typing import Any

from atoll.clock import Clock
from atoll.hub.http.views import describe_member, describe_node
from atoll.hub.nodes.membership import Membership
from atoll.hub.rounds.service import RoundService
from atoll.hub.scheduler.scheduler import Scheduler
from atoll.hub.sessions.session import Sessions
from atoll.hub.stores import Stores
from atoll.ids import session_id
from atoll.wire.states import JobState


class HubLive:
    """Read-only views of sessions and members, and the three verbs of a job."""

    def __init__(
        self,
        stores: Stores,
        sessions: Sessions,
        membership: Membership,
        placement: Scheduler,
        rounds: RoundService,
        clock: Clock,
    ) -> None:
        self._stores = stores
        self._sessions = sessions
        self._membership = membership
        self._placement = placement
        self._rounds = rounds
        self._clock = clock

    def nodes(self) -> list[dict[str, Any]]:
        """Return every node that joined since the hub started."""
        now = self._clock.monotonic()
        views = []
        for node in self._membership.nodes.values():
            running = [
                (job.job, member.member)
                for job in self._stores.jobs.list()
                if job.state == JobState.RUNNING
                for member in job.processes
                if member.node == node.node and member.live
            ]
            view = describe_node(
                node,
                self._sessions.get(node.node),
                now,
                running=[session_id(*pair) for pair in running],
                told=[self._told(*pair) for pair in running],
            )
            views.append(view)
        return views

    def members(self, job: str) -> dict[str, dict[str, Any]]:
        """Return what is known of each member of a job beyond its record."""
        now = self._clock.monotonic()
        return {
            member: describe_member(
                self._sessions.get(session_id(job, member)), now, told=self._told(job, member)
            )
            | self._rounds.describe(job, member)
            for member in self._stores.jobs.get(job).members
        }

    async def rounds(self, job: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Return decided attempts of rounds, oldest first."""
        return await self._rounds.store.history(job, after=after, limit=limit)

    async def submit(self, job: str) -> None:
        """Place a new job, or leave it waiting."""
        await self._placement.submit(job)

    async def stop(self, job: str, *, grace_s: float) -> None:
        """End a job."""
        await self._placement.stop(job, grace_s=grace_s)

    async def scale(self, job: str, *, least: int, most: int) -> None:
        """Let a job have other bounds of members from now on."""
        await self._placement.scale(job, least=least, most=most)

    async def resume(self, job: str, *, spec: str = "") -> str:
        """Start a job again from its newest checkpoint, with a changed file if it is given."""
        async with self._stores.jobs.reviving:
            return await self._placement.resume(job, spec=spec)

    def relay(self) -> dict[str, float]:
        """Return the counters of the relay."""
        relay = self._sessions.relay
        return {
            "frames": relay.frames,
            "bytes": relay.bytes,
            "dropped": relay.dropped,
            "sessions": len(self._sessions),
        }

    def _told(self, job: str, member: str) -> dict[str, float]:
        """Return the newest measurement of every name that a member reported."""
        latest = self._stores.metrics.latest(job).get(member)
        return latest.values if latest else {}
