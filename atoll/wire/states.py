"""States of jobs, members, nodes and processes, as wire, database and views write them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """State of a job; a job that has ended can be resumed and then waits again."""

    WAITING = "waiting"
    """For nodes."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """Whether nothing of the job runs any more."""
        return self in (JobState.DONE, JobState.FAILED, JobState.STOPPED)


class MemberState(StrEnum):
    """State of the process of a member, a follower host or a reducer."""

    ASSIGNED = "assigned"
    """To a node that has not answered the launch command yet."""
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """The hub does not hear of it; it may come back."""
    LEFT = "left"
    """It went because its machine did; it is launched elsewhere."""
    STOPPED = "stopped"

    @property
    def live(self) -> bool:
        """Whether its process runs or is about to."""
        return self in (MemberState.ASSIGNED, MemberState.STARTING, MemberState.RUNNING)


class ProcessPhase(StrEnum):
    """What a node reports of a process."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


class NodeState(StrEnum):
    """Whether a node is connected to the hub."""

    ONLINE = "online"
    LOST = "lost"
