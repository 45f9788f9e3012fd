"""The groups of each job that meet in rounds: one, or one per stage of a SWARM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.errors import EpochChanged
from atoll.hub.jobs.jobs import Job
from atoll.hub.rounds.runtime import RoundRuntime
from atoll.rounds.checks import is_behind
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import Effect, Planned
from atoll.wire.messages import Verdict
from atoll.wire.states import RoundMemberState


@dataclass(frozen=True)
class Meeting:
    """Who meets in a group now."""

    closing: int
    """The `closing` that a join must name; -1: they do not meet at present."""
    members: frozenset[str]
    required: frozenset[str]
    round: int = -1
    """Number of the round while they meet; -1: the rounds themselves count."""
    last: bool = False
    """The job ends with this round."""
    guests: frozenset[str] = frozenset()
    """Those of `members` that meet in other groups, too."""
    over: bool = False
    """No further round: guests that were too late for the last one take over its state."""


class Meetings(Protocol):
    """Decides which members meet in which group, for jobs that have several."""

    def groups(self, job: Job) -> int:
        """Return the number of groups; 0: an ordinary job, whose members all meet."""
        ...

    def groups_of(self, job: str, member: str) -> Sequence[int]:
        """Return the groups of a member, ascending; empty: none at present."""
        ...

    def meeting(self, job: str, group: int) -> Meeting:
        """Return who meets in a group now."""
        ...

    def working(self, job: str) -> set[str]:
        """Return members that have work left although they meet in no round now."""
        ...

    def gone(self, job: str, member: str) -> None:
        """A process has ended, leaves, or was silent for too long."""
        ...

    def committed(self, job: str, verdict: Verdict, closing: int) -> None:
        """A round of a group was committed, in which members joined for this closing."""
        ...

    async def begin_again(self, job: str) -> None:
        """An ended job is resumed: earlier decisions about its groups no longer hold."""
        ...


class RoundObserver(Protocol):
    """Learns of attempts and verdicts of verified jobs; MUST NOT block."""

    def planned(self, effect: Planned, slots: DataSlots) -> None:
        """An attempt was stored; `slots`: the data that its members were given."""
        ...

    def committed(self, job: str, verdict: Verdict) -> None:
        """A round was committed."""
        ...

    def watched(self, job: str) -> frozenset[str]:
        """Return the members with a strike, which must first prove that they compute."""
        ...


class AllTogether:
    """Jobs without groups."""

    def groups(self, job: Job) -> int:
        """Return 0."""
        return 0

    def groups_of(self, job: str, member: str) -> Sequence[int]:
        """Return the only group."""
        return (0,)

    def meeting(self, job: str, group: int) -> Meeting:
        """Return an empty meeting."""
        return Meeting(0, frozenset(), frozenset())

    def working(self, job: str) -> set[str]:
        """Return no member: all meet."""
        return set()

    def gone(self, job: str, member: str) -> None:
        """Do nothing."""

    def committed(self, job: str, verdict: Verdict, closing: int) -> None:
        """Do nothing."""

    async def begin_again(self, job: str) -> None:
        """Do nothing."""


class Runtimes:
    """The runtimes of all running jobs, by job and group."""

    def __init__(self) -> None:
        self.meetings: Meetings = AllTogether()
        self.observer: RoundObserver | None = None
        self._by_job: dict[str, list[RoundRuntime]] = {}

    def __contains__(self, job: str) -> bool:
        """Return whether a job's rounds are open."""
        return job in self._by_job

    def __iter__(self) -> Iterator[RoundRuntime]:
        """Iterate over all runtimes."""
        return iter([runtime for runtimes in self._by_job.values() for runtime in runtimes])

    def open(self, job: str, runtimes: list[RoundRuntime]) -> None:
        """Add a job's runtimes, one per group."""
        self._by_job[job] = runtimes

    def close(self, job: str) -> None:
        """Forget a job; pending requests get an error."""
        for runtime in self._by_job.pop(job, []):
            runtime.close()

    def of(self, job: str) -> list[RoundRuntime]:
        """Return the runtimes of a job, by group; empty: its rounds are not open."""
        return self._by_job.get(job, [])

    def find(self, job: str, member: str, group: int = -1) -> RoundRuntime | None:
        """Return the runtime of a group in which a member meets others; -1: of its first one."""
        found = self.all_of(job, member)
        return next((one for one in found if group in {-1, one.machine.group}), None)

    def all_of(self, job: str, member: str) -> list[RoundRuntime]:
        """Return the runtimes of all groups in which a member meets others."""
        runtimes = self.of(job)
        if not runtimes or not runtimes[0].grouped:
            return runtimes[:1]
        groups = self.meetings.groups_of(job, member)
        return [runtimes[group] for group in groups if 0 <= group < len(runtimes)]

    def planned(self, runtime: RoundRuntime, effect: Planned) -> None:
        """An attempt was stored."""
        if self.observer is not None and effect.plan.verified:
            self.observer.planned(effect, runtime.machine.commit_log.data_slots)

    def committed(self, runtime: RoundRuntime, verdict: Verdict) -> None:
        """A round was committed, and its verdict stored."""
        self.meetings.committed(runtime.job, verdict, runtime.closing)
        if self.observer is not None:
            self.observer.committed(runtime.job, verdict)

    def gather(self, runtime: RoundRuntime) -> list[Effect]:
        """Let a group's round wait for those that meet in it now, and for no others.

        A join for another closing is refused: its member may hold another state than is agreed on.
        """
        machine, job = runtime.machine, runtime.job
        if not runtime.grouped:
            return []
        states = machine.members.states
        for member, state in list(states.items()):
            if state == RoundMemberState.AWAY:
                self.meetings.gone(job, member)
        meeting = self.meetings.meeting(job, machine.group)
        machine.required, machine.stopping = meeting.required, meeting.last
        machine.guests = meeting.guests
        if meeting.round >= 0 and machine.attempt is None:
            # A stage meets again for the same step if all that held its mean were lost.
            machine.committed_round = meeting.round
        effects: list[Effect] = []
        for member in states.keys() - meeting.members:
            effects += machine.step_aside(member, RoundMemberState.GONE)
            runtime.refuse(member, _other_closing(meeting.closing))
            del states[member]
        for member in meeting.members:
            if states.get(member, RoundMemberState.GONE) == RoundMemberState.GONE:
                states[member] = RoundMemberState.LIVE
        for member, join in list(machine.joins.items()):
            if meeting.over and member in meeting.guests:
                machine.pending.leave(member)
                runtime.refuse(member, is_behind(join.round, machine.committed_round))
            elif join.closing != meeting.closing:
                machine.pending.leave(member)
                runtime.refuse(member, _other_closing(meeting.closing))
        return effects

    def check(self, runtime: RoundRuntime, closing: int) -> None:
        """Raise EpochChanged if a join is for another closing than the present one."""
        if runtime.grouped:
            meeting = self.meetings.meeting(runtime.job, runtime.machine.group)
            if closing != meeting.closing:
                raise _other_closing(meeting.closing)


def _other_closing(closing: int) -> EpochChanged:
    return EpochChanged(
        "the members of this stage do not meet for this closing",
        expected="the step to be closed first" if closing < 0 else f"closing {closing}",
        remedy="watch the swarm's news, and join again when the stage is closed",
    )
