"""When a member that was lost, failed or left is launched again."""

from __future__ import annotations

from atoll.clock import Clock
from atoll.hub.jobs import LIVE_STATES, Job, Member
from atoll.ids import member_id

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
    lacking = [slot for slot, m in members.items() if m is None or m.state not in LIVE_STATES]
    if not any(member.state == "done" for member in job.members.values()):
        return lacking
    begun = [slot for slot in lacking if (m := members[slot]) is not None and m.state != "done"]
    return begun if job.separate else []


def failures_after(member: Member) -> int:
    """Return how many launches in a row have failed with this one; to leave is no failure."""
    return member.failures + (member.state != "left")


def pause_s(failures: int) -> float:
    """Return the pause before the next launch after so many relaunches without a commit."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


class Relaunches:
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
        wait_s = max(pause_s(member.failures), LEFT_PAUSE_S if member.state == "left" else 0.0)
        if program:
            wait_s = max(wait_s, pause_s(member.retried + 1))
        if member.state == "lost" and silent and not (member.incarnation or node_is_there):
            wait_s = max(wait_s, AWAY_S)
        if member.state == "lost" and member.exit_code is None and member.incarnation:
            if node_is_there:
                wait_s = max(wait_s, RETURN_S)
            if may_return:
                wait_s = max(wait_s, LAST_RETURN_S)
        return now >= since + wait_s

    def steady(self, job: str, member: Member) -> bool:
        """Return whether a member has worked so long by now that its failures count no more."""
        key = (job, member.member, member.attempt)
        if member.state != "running" or not (member.failures or member.retried):
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
