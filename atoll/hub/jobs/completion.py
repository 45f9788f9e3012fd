"""Whether a process is launched again, and when and how a job has ended; pure functions.

A job is done when the work of every member that was launched is finished. Members that take part in
rounds share their work: it is finished as soon as one of them is done. The work of any other member
(a command, a server, a script without `run.wrap`, a role of an [rl] job) is its own: it is launched
again until it has reported its end itself.

Members of an [rl] job work independently: one that fails does not end the others. The critic serves
the actors: it stops when all of them are done, and gets a request to stop if some never will be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from atoll.clock import Clock
from atoll.hub.jobs.people import name_of
from atoll.hub.jobs.record import Job, Member
from atoll.ids import member_id, slot_of
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED
from atoll.wire.states import JobState, MemberState

RETURN_S = 3.0
"""How long a lost process may reconnect while its node is connected."""
LAST_RETURN_S = 20.0
"""The same for members that hold the state if no other member does."""
AWAY_S = 30.0
"""How long a process without a session may run on a node that is disconnected."""
LEFT_PAUSE_S = 1.0
"""A member that left on purpose may do so because its machine goes away, which is reported soon."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
ABSENT_S = 300.0
"""How long the end of an elastic job waits for a member that has no place."""
STEADY_S = 60.0
"""Independent members: work of this duration resets the count of failures."""
MAX_FAILURES = 8
"""Consecutive launches without a committed round after which a member is not launched again."""


def missing(job: Job) -> list[int]:
    """Return the slots whose members should run and do not, lowest first.

    Once one member is done, only those are launched that have begun and are not finished.
    """
    members = {slot: job.members.get(member_id(slot)) for slot in range(job.nodes_wanted)}
    lacking = [slot for slot, m in members.items() if m is None or not m.live]
    if not any(member.state == MemberState.DONE for member in job.members.values()):
        return lacking
    begun = [(slot, m) for slot in lacking if (m := members[slot]) is not None]
    return [slot for slot, member in begun if not is_finished(member, job)]


def is_finished(member: Member, job: Job) -> bool:
    """Return whether a member's work is finished, by itself or by a member that shares it."""
    if member.state == MemberState.DONE:
        return True
    others = job.members.values() if shares_work(member, job) else ()
    return any(other.state == MemberState.DONE and shares_work(other, job) for other in others)


def shares_work(member: Member, job: Job) -> bool:
    """Return whether a member does the same work as all members of its group.

    A built-in trainer before its first round counts as a newcomer to the group. A script may have
    another role as long as it takes part in no round.
    """
    if job.of_policies:
        return False
    return member.in_rounds or (job.kind == "trainer" and job.committed_round > 0)


def failures_after(member: Member) -> int:
    """Return the consecutive failed launches including this one; leaving is no failure."""
    return member.failures + (member.state != MemberState.LEFT)


def pause_s(failures: int) -> float:
    """Return the pause before the next launch, by the number of launches without a commit."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


class RestartPolicy:
    """Remembers when each member was first missing, and which are not launched again."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str, int], float] = {}
        """Monotonic time at which the end of an attempt was noticed."""
        self._given_up: set[tuple[str, str]] = set()
        self._working: dict[tuple[str, str, int], float] = {}
        """Monotonic time at which an attempt after failed ones was first seen working."""

    def due(
        self,
        job: str,
        member: Member,
        *,
        node_is_there: bool,
        may_return: bool,
        silent: bool = False,
        program: bool = False,
    ) -> bool:
        """Return whether to launch a member again now.

        A silent member whose node is connected may reconnect; one that has ended, or whose node is
        gone, is replaced at once. The wait grows with repeated failures.

        Args:
            job: Its job.
            member: Its record.
            node_is_there: Its node is connected.
            may_return: All members that have the state are lost: they get more time.
            silent: It may never register with the hub, and may come back with its node.
            program: Its own program failed.
        """
        now = self._clock.monotonic()
        since = self._since.setdefault((job, member.member, member.attempt), now)
        wait_s = max(
            pause_s(member.failures), LEFT_PAUSE_S if member.state == MemberState.LEFT else 0.0
        )
        if program:
            wait_s = max(wait_s, pause_s(member.retried + 1))
        if (
            member.state == MemberState.LOST
            and silent
            and not (member.incarnation or node_is_there)
        ):
            wait_s = max(wait_s, AWAY_S)
        if member.state == MemberState.LOST and member.exit_code is None and member.incarnation:
            if node_is_there:
                wait_s = max(wait_s, RETURN_S)
            if may_return:
                wait_s = max(wait_s, LAST_RETURN_S)
        return now >= since + wait_s

    def steady(self, job: str, member: Member) -> bool:
        """Return whether a member has worked long enough for its failures to be reset."""
        key = (job, member.member, member.attempt)
        if member.state != MemberState.RUNNING or not (member.failures or member.retried):
            self._working.pop(key, None)
            return False
        now = self._clock.monotonic()
        return now - self._working.setdefault(key, now) > STEADY_S

    def launched(self, job: str, member: Member) -> None:
        """Record a new attempt."""
        self._since.pop((job, member.member, member.attempt - 1), None)

    def absent(self, job: Job) -> set[str]:
        """Return the members without a place for `ABSENT_S`; an elastic job ends without them.

        The count starts anew for a member that was back meanwhile.
        """
        now, found = self._clock.monotonic(), set()
        for member in job.members.values():
            key = (job.job, member.member, member.attempt)
            if member.live:
                self._since.pop(key, None)
            elif now > self._since.get(key, now) + ABSENT_S:
                found.add(member.member)
        return found if 0 < job.min_nodes <= _count_done(job) else set()

    def first_time(self, job: str, member: str) -> bool:
        """Return whether a member is given up for the first time."""
        if (job, member) in self._given_up:
            return False
        self._given_up.add((job, member))
        return True

    def forget(self, job: str) -> None:
        """Drop the entries of a job that has ended."""
        self._since = {key: at for key, at in self._since.items() if key[0] != job}
        self._given_up = {key for key in self._given_up if key[0] != job}
        self._working = {key: at for key, at in self._working.items() if key[0] != job}


FATAL_KINDS = frozenset({"ConfigError", "DataError", "LossNotFinite", "CheckpointCorrupt"})
"""Errors of the job that a restart cannot fix: the first of them ends the job."""

PROGRAM_KINDS = frozenset({"ScriptError", "OutOfMemory", "NotAllowed"})
"""Errors of the program: it is restarted up to the job's `retries`.

A killed process, a lost machine or a lost hub is not among them."""

OF_ITS_MACHINE = frozenset({"OutOfMemory", "NotAllowed"})
"""Those of them that may not occur on another machine."""

ENDED_BY_SIGNAL = frozenset({-1, -2, -9, -15, 129, 130, 137, 143})
"""Exit statuses of a process ended by a signal, directly or in a container."""

End = tuple[JobState, str, dict[str, str] | None]
"""State, reason and error of a job that has ended."""


def program_failed(member: Member, *, trainer: bool) -> bool:
    """Return whether a process ended by a fault of its own program.

    Args:
        member: Its record.
        trainer: It is the built-in trainer, whose bare exits are the machine's fault.
    """
    if member.state != MemberState.FAILED:
        return False
    kind = (member.error or {}).get("kind", "")
    if kind in PROGRAM_KINDS:
        return True
    if trainer or kind not in ("", "JobError") or member.exit_code is None:
        return False
    return member.exit_code != 0 and member.exit_code not in ENDED_BY_SIGNAL


def budget_exhausted(member: Member, job: Job) -> bool:
    """Return whether a program has failed more often than its job allows."""
    retries = job.spec.job.retries
    return program_failed(member, trainer=job.kind == "trainer") and member.retried >= retries


def restarts_exhausted(member: Member, job: Job) -> bool:
    """Return whether a member that does not run is not launched again."""
    if member.live:
        return False
    if job.of_policies and (member.error or {}).get("kind", "") in FATAL_KINDS:
        return True
    return failures_after(member) >= MAX_FAILURES or budget_exhausted(member, job)


def outcome(
    job: Job, *, working: Collection[str] | None = None, absent: Collection[str] = ()
) -> End | None:
    """Return how a job has ended, or None while it continues.

    Args:
        job: Its record.
        working: Members that hold the group's state; others of the group are still recovering
            and do not keep a finished job alive. None: all live members.
        absent: Members that have had no place for long.
    """
    members = _members(job)
    for member in members:
        if _ends_the_job(member, job):
            what = (member.error or {}).get("what", "it failed")
            reason = f"{name_of(job, member)}: {what}"
            return JobState.FAILED, reason, member.error
    open_ = [m for m in members if not is_finished(m, job)]
    if any(m.live and (m in open_ or working is None or m.member in working) for m in members):
        return None
    if job.stopping:
        return JobState.STOPPED, "stopped by operator", None
    without = [m for m in open_ if m.member in absent or _is_left_out(m, job)]
    lost = [m for m in open_ if m not in without]
    done = any(m.state == MemberState.DONE for m in members)
    if done and not lost:
        return JobState.DONE, _ended_without(job, without), None
    if not lost or not all(restarts_exhausted(m, job) for m in lost):
        return None
    errors = [m.error for m in lost if m.error]
    reason = f"{_names(job, lost)} ended without finishing" if done else "every member was lost"
    return JobState.FAILED, reason, errors[0] if errors else None


def _count_done(job: Job) -> int:
    return sum(member.state == MemberState.DONE for member in job.members.values())


def _is_left_out(member: Member, job: Job) -> bool:
    """Return whether a finished group has gone on without a member because of its machine."""
    group_done = any(
        m.state == MemberState.DONE and shares_work(m, job) for m in job.members.values()
    )
    of_its_machine = (member.error or {}).get("kind", "") in OF_ITS_MACHINE
    return group_done and of_its_machine and restarts_exhausted(member, job)


def _ended_without(job: Job, without: Iterable[Member]) -> str:
    """Return the reason of a job that is done although members have not finished."""
    names = _names(job, without)
    return f"without {names}, which did not come back" if names else ""


def covered_by_others(job: Job) -> str:
    """Return which members of a finished group were lost before they reported their own end."""
    over = (MemberState.FAILED, MemberState.LOST)
    lost = [m for m in _members(job) if m.state in over and is_finished(m, job)]
    return (
        f"{_names(job, lost)} did not report the end: others have finished its work" if lost else ""
    )


def _names(job: Job, members: Iterable[Member]) -> str:
    return ", ".join(name_of(job, member) for member in members)


def _ends_the_job(member: Member, job: Job) -> bool:
    """Return whether one member's failure is the failure of the job.

    A group continues without a machine that has too little memory or whose owner refuses it.
    """
    kind = (member.error or {}).get("kind", "")
    if kind in FATAL_KINDS:
        return True
    together = not job.separate and job.nodes_wanted > 1
    return budget_exhausted(member, job) and not (together and kind in OF_ITS_MACHINE)


def end_state(record: Member, exit_code: int | None, *, stopping: bool) -> MemberState:
    """Return the state of a member whose process has ended."""
    if exit_code == 0:
        return MemberState.DONE
    if stopping:
        return MemberState.STOPPED
    if exit_code == EXIT_REPLACED:
        return MemberState.LOST
    left = exit_code == EXIT_LEFT or record.leaving
    return MemberState.LEFT if left else MemberState.FAILED


def reports_directly(job: Job) -> list[str]:
    """Return the live members outside of rounds, which get a stop request as a message.

    These are the critic, and actors of policies that do not synchronize.
    """
    if not job.of_policies:
        return []
    alone = job.spec.alone
    live = [m.member for m in job.members.values() if m.live]
    return sorted((m for m in live if alone or m in job.aside), key=slot_of)


def without_end(job: Job) -> bool:
    """Return whether only the critic runs and waits for actors that will never be done."""
    actors = [m for m in _members(job) if m.member not in job.aside]
    live = [m for m in job.members.values() if m.live]
    waits = bool(live) and all(m.member in job.aside for m in live)
    if not waits or job.spec.rl.pool:  # the critic of a pool serves other jobs, too
        return False
    over = len(actors) > 0 and all(_is_over(m, job) for m in actors)
    return over and any(m.state != MemberState.DONE for m in actors)


def rl_outcome(job: Job) -> End | None:
    """Return how an [rl] job has ended, or None while it continues."""
    members = _members(job)
    if any(m.live for m in members):
        return None
    if job.stopping:
        return JobState.STOPPED, "stopped by operator", None
    if len(members) < (job.min_nodes or job.nodes_wanted):
        return None
    actors = [m for m in members if m.member not in job.aside]
    lost = [m for m in actors if _is_over(m, job) and m.state != MemberState.DONE]
    if not all(_is_over(m, job) for m in actors):
        return None
    served = bool(lost) or all(_is_over(m, job) for m in members)
    if not served:
        return None
    failed = lost or [m for m in members if m.state != MemberState.DONE]
    if not failed:
        return JobState.DONE, "", None
    first = failed[0]
    what = (first.error or {}).get("what", "it failed repeatedly")
    others = f"; also failed: {_names(job, failed[1:])}" if failed[1:] else ""
    return JobState.FAILED, f"{name_of(job, first)}: {what}{others}", first.error


def _is_over(member: Member, job: Job) -> bool:
    """Return whether a member will not work again."""
    return member.state == MemberState.DONE or restarts_exhausted(member, job)


def _members(job: Job) -> list[Member]:
    found: Iterable[Member] = (m for m in job.members.values() if m.slot < job.nodes_wanted)
    return sorted(found, key=lambda m: m.slot)
