"""When a process that failed is not started again, and when and how a job has ended. Pure.

When a member that was lost, failed or left is launched again.

What differs in a job of policies: each member works for itself, and one may be the critic. Pure.

One that fails for good ends nobody else's work. The critic serves the actors, so it ends when they
have: it notices by itself when all of them are done, and is told if some of them never will be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from atoll.clock import Clock
from atoll.hub.jobs.jobs import Job, Member
from atoll.ids import member_id, slot_of
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED
from atoll.wire.states import JobState, MemberState

RETURN_S = 3.0
"""How long a lost process may come back by itself while its node is there."""
LAST_RETURN_S = 20.0
"""The same for members that have the state when nobody else has it."""
AWAY_S = 30.0
"""How long a process that never speaks may live on unheard on a node that is away."""
LEFT_PAUSE_S = 1.0
"""A member that left on purpose may do so because its machine goes away, which is told soon."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0
"""Where each works for itself: work of this length ends a row of failures."""
MAX_FAILURES = 8
"""Launches in a row without a committed round after which a member is given up."""


def missing(job: Job) -> list[int]:
    """Return the slots whose members are to be there and do not live, lowest first.

    Once one is done, the work of those that train together is, too. Where each works for itself,
    those that have begun end their own work, and no more are begun.
    """
    members = {slot: job.members.get(member_id(slot)) for slot in range(job.nodes_wanted)}
    lacking = [slot for slot, m in members.items() if m is None or not m.live]
    if not any(member.state == MemberState.DONE for member in job.members.values()):
        return lacking
    begun = [
        slot for slot in lacking if (m := members[slot]) is not None and m.state != MemberState.DONE
    ]
    return begun if job.separate else []


def failures_after(member: Member) -> int:
    """Return how many launches in a row have failed with this one; to leave is no failure."""
    return member.failures + (member.state != MemberState.LEFT)


def pause_s(failures: int) -> float:
    """Return the pause before the next launch after so many relaunches without a commit."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


class RestartPolicy:
    """Remembers when each missing member was first seen missing, and which were given up."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str, int], float] = {}
        """Monotonic time at which an attempt was found to have ended."""
        self._given_up: set[tuple[str, str]] = set()
        self._working: dict[tuple[str, str, int], float] = {}
        """Monotonic time at which an attempt that follows failed ones was first seen at work."""

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
        """Return whether it is time to launch a member again.

        One that was lost by silence while its node is there may come back by itself; one whose
        end is known, or whose node is gone, is replaced at once. Members that failed again and
        again wait longer each time.

        Args:
            job: Its job.
            member: Its record.
            node_is_there: Its node is connected.
            may_return: All members that have the state are lost: they get more time.
            silent: It may never speak, and come back with its node.
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
        """Return whether a member has worked so long by now that its failures count no more."""
        key = (job, member.member, member.attempt)
        if member.state != MemberState.RUNNING or not (member.failures or member.retried):
            self._working.pop(key, None)
            return False
        now = self._clock.monotonic()
        return now - self._working.setdefault(key, now) > STEADY_S

    def launched(self, job: str, member: Member) -> None:
        """Note a new attempt."""
        self._since.pop((job, member.member, member.attempt - 1), None)

    def first_time(self, job: str, member: str) -> bool:
        """Return whether a member is given up just now."""
        if (job, member) in self._given_up:
            return False
        self._given_up.add((job, member))
        return True

    def forget(self, job: str) -> None:
        """Drop what concerns a job that has ended."""
        self._since = {key: at for key, at in self._since.items() if key[0] != job}
        self._given_up = {key for key in self._given_up if key[0] != job}
        self._working = {key: at for key, at in self._working.items() if key[0] != job}


FATAL_KINDS = frozenset({"ConfigError", "DataError", "LossNotFinite", "CheckpointCorrupt"})
"""Errors of the job itself that another try cannot cure: the first of them ends the job."""

PROGRAM_KINDS = frozenset({"ScriptError", "OutOfMemory", "NotAllowed"})
"""Errors of the program: it is tried again as often as the job says.

A process that was killed, whose machine went away or that lost the hub is none of these."""

OF_ITS_MACHINE = frozenset({"OutOfMemory", "NotAllowed"})
"""Those of them that another machine may not meet."""

ENDED_BY_SIGNAL = frozenset({-1, -2, -9, -15, 129, 130, 137, 143})
"""Exit statuses of a process that somebody else ended, directly or in a container."""

End = tuple[JobState, str, dict[str, str] | None]
"""State, reason and error of a job that has ended."""


def program_failed(member: Member, *, trainer: bool) -> bool:
    """Return whether a process came to its end by a fault of its own program.

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
    """Return whether a member that does not live is not launched again."""
    if member.live:
        return False
    if job.of_policies and (member.error or {}).get("kind", "") in FATAL_KINDS:
        return True
    return failures_after(member) >= MAX_FAILURES or budget_exhausted(member, job)


def outcome(job: Job, *, working: Collection[str] | None = None) -> End | None:
    """Return how a job has ended, or None while it goes on.

    Args:
        job: Its record.
        working: Members that stand on the state of the group; the others that live are on their
            way to it and do not keep a job alive whose work is done. None: all that live.
    """
    members = {n: m for n, m in job.members.items() if m.slot < job.nodes_wanted}
    for member in members.values():
        if _ends_the_job(member, job):
            reason = f"{member.member}: {(member.error or {}).get('what', 'it failed')}"
            return JobState.FAILED, reason, member.error
    live = [member.member for member in members.values() if member.live]
    done = _is_done(members, job)
    if any(working is None or member in working for member in live) or (live and not done):
        return None
    if job.stopping:
        return JobState.STOPPED, "a stop was asked for", None
    if done:
        return JobState.DONE, "", None
    if not members or not all(restarts_exhausted(member, job) for member in members.values()):
        return None
    errors = [member.error for member in members.values() if member.error]
    return JobState.FAILED, "every member was lost", errors[0] if errors else None


def _is_done(members: Mapping[str, Member], job: Job) -> bool:
    """Return whether the work is done: one tells for all that train together, else each for itself.

    One that ends early, before others were even started, does not speak for them.
    """
    done = sum(member.state == MemberState.DONE for member in members.values())
    if not job.separate:
        return done > 0
    return done > 0 and done == len(members) and done >= (job.min_nodes or job.nodes_wanted)


def _ends_the_job(member: Member, job: Job) -> bool:
    """Return whether the failure of one member is the failure of all.

    A group goes on without a machine that has too little memory, or whose owner refuses it.
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
    """Return the live members that meet in no rounds, and hear of a stop by a message of its own.

    The critic never meets the others; actors only do where policies agree.
    """
    if not job.of_policies:
        return []
    alone = job.spec.alone
    live = [m.member for m in job.members.values() if m.live]
    return sorted((m for m in live if alone or m in job.aside), key=slot_of)


def without_end(job: Job) -> bool:
    """Return whether only the critic lives, and waits for actors that will never be done."""
    actors = [m for m in _members(job) if m.member not in job.aside]
    live = [m for m in job.members.values() if m.live]
    waits = bool(live) and all(m.member in job.aside for m in live)
    if not waits or job.spec.rl.pool:  # that of a pool serves other jobs, too
        return False
    over = len(actors) > 0 and all(_is_over(m, job) for m in actors)
    return over and any(m.state != MemberState.DONE for m in actors)


def rl_outcome(job: Job) -> End | None:
    """Return how a job of policies has ended, or None while it goes on."""
    members = _members(job)
    if any(m.live for m in members):
        return None
    if job.stopping:
        return JobState.STOPPED, "a stop was asked for", None
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
    what = (first.error or {}).get("what", "it failed again and again")
    others = f"; so did {', '.join(m.member for m in failed[1:])}" if failed[1:] else ""
    return JobState.FAILED, f"{first.member}: {what}{others}", first.error


def _is_over(member: Member, job: Job) -> bool:
    """Return whether a member will not work again."""
    return member.state == MemberState.DONE or restarts_exhausted(member, job)


def _members(job: Job) -> list[Member]:
    found: Iterable[Member] = (m for m in job.members.values() if m.slot < job.nodes_wanted)
    return sorted(found, key=lambda m: m.slot)
