"""States of jobs, members, nodes and processes, as stored, sent and shown."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """State of a job; an ended job can be resumed and is then `waiting` again."""

    WAITING = "waiting"
    """For nodes."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """Whether no process of the job runs any more."""
        return self in (JobState.DONE, JobState.FAILED, JobState.STOPPED)


class MemberState(StrEnum):
    """State of the process of a member, a follower host or a reducer."""

    ASSIGNED = "assigned"
    """To a node that has not yet answered the launch command."""
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """Its connection is lost; it may come back."""
    LEFT = "left"
    """It left with its machine and is launched elsewhere."""
    STOPPED = "stopped"

    @property
    def live(self) -> bool:
        """Whether its process runs or is being started."""
        return self in (MemberState.ASSIGNED, MemberState.STARTING, MemberState.RUNNING)


class RoundMemberState(StrEnum):
    """State of a member as far as rounds are concerned."""

    EXPECTED = "expected"
    """Its process starts with the job; rounds wait for it."""
    LAUNCHED = "launched"
    """A newcomer that has not requested the committed state; rounds do not wait for it."""
    RECOVERING = "recovering"
    """It recovers the committed state; rounds wait for a bounded time."""
    LIVE = "live"
    """It trains, or waits in a join."""
    AWAY = "away"
    """Its process runs, but was silent or late, or fell behind; rounds do not wait for it."""
    GONE = "gone"
    """Its process has ended, or it is leaving."""


class ProcessPhase(StrEnum):
    """State of a process as reported by a node."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


class NodeState(StrEnum):
    """State of a node: whether it is connected to the hub, and for people also what it does."""

    ONLINE = "online"
    LOST = "lost"
    """Its connection ended without notice."""
    LEFT = "left"
    """Its agent announced that it ends."""
    PAUSED = "paused"
    """Connected; its owner's policy takes no work now."""
    DRAINING = "draining"
    """Connected; it gives back what it runs."""
    DRAINED = "drained"
    """Connected; it runs nothing and takes no work."""
