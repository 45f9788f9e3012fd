"""Jobs whose members meet in several groups: the stages of a SWARM, or the modules of paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.hub.jobs.jobs import Job
from atoll.hub.nodes.membership import Membership
from atoll.hub.paths.service import PathService
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.groups import Meeting, Meetings
from atoll.hub.rounds.service import RoundService
from atoll.hub.sessions.session import Sessions
from atoll.hub.stores import Stores
from atoll.hub.swarm.service import SwarmService
from atoll.ids import session_id
from atoll.wire.messages import Verdict


@dataclass(frozen=True, slots=True)
class GroupedJobs:
    """Asks the service of a job's kind; see :class:`Meetings`."""

    stores: Stores
    swarm: SwarmService
    paths: PathService

    @classmethod
    def of(
        cls, stores: Stores, *, checkpoints: Checkpoints, membership: Membership,
        rounds: RoundService, sessions: Sessions, clock: Clock, start_s: float,
    ) -> GroupedJobs:  # fmt: skip
        """Make both services, and let them decide about rounds and checkpoints of such jobs."""
        began = clock.monotonic()

        def unheard_s(job: str, member: str) -> float:
            session = sessions.get(session_id(job, member))
            last_seen = session.last_seen if session is not None else began
            return clock.monotonic() - max(last_seen, began)

        swarm = SwarmService(
            jobs=stores.jobs, events=stores.events, checkpoints=checkpoints, clock=clock,
            live=membership.live, rounds=rounds.runtimes, metrics=stores.metrics,
        )  # fmt: skip
        paths = PathService(
            stores, checkpoints=checkpoints, clock=clock, rounds=rounds.runtimes,
            live=membership.live, unheard_s=unheard_s, start_s=start_s,
        )  # fmt: skip
        found = cls(stores, swarm, paths)
        rounds.runtimes.meetings, checkpoints.stages_saved = found, found.saved
        checkpoints.stage_due = found.due
        return found

    def _of(self, job: str) -> Meetings:
        record = self.stores.jobs.find(job)
        return self.paths if record is not None and record.spec.dipaco.modules else self.swarm

    def groups(self, job: Job) -> int:
        """Return the stages or modules of a job; 0: its members all meet."""
        return job.spec.parts_saved

    def groups_of(self, job: str, member: str) -> Sequence[int]:
        """Return the groups of a member."""
        return self._of(job).groups_of(job, member)

    def meeting(self, job: str, group: int) -> Meeting:
        """Return who meets in a group now."""
        return self._of(job).meeting(job, group)

    def working(self, job: str) -> set[str]:
        """Return members that have work left although they meet in no round now."""
        return self._of(job).working(job)

    def gone(self, job: str, member: str) -> None:
        """A process has ended, leaves, or was silent for too long."""
        self._of(job).gone(job, member)

    def committed(self, job: str, verdict: Verdict, closing: int) -> None:
        """A round of a group was committed."""
        self._of(job).committed(job, verdict, closing)

    async def begin_again(self, job: str) -> None:
        """An ended job is resumed."""
        await self._of(job).begin_again(job)

    async def due(self, job: str, member: str, round_: int, group: int) -> bool:
        """Return whether a member was to save a stage or module as of a step or phase."""
        if self.stores.jobs.get(job).spec.dipaco.modules:
            return self.paths.due(job, member, round_, group)
        return await self.swarm.due(job, member, round_, group)

    async def saved(self, job: str, round_: int) -> None:
        """A checkpoint of all stages or modules is complete."""
        if not self.stores.jobs.get(job).spec.dipaco.modules:
            await self.swarm.saved(job, round_)
