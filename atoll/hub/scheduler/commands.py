"""Commands to nodes: start a process, end a process. Each is put into a queue once."""

from __future__ import annotations

from atoll.hub.jobs.jobs import Job
from atoll.hub.stores import Stores
from atoll.wire.messages import Launch, Stop, pack_command
from atoll.wire.states import JobState, MemberState

KILL_GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL when a process must end."""


class LaunchCommands:
    """Puts the commands for members and followers into their nodes' queues."""

    def __init__(self, *, stores: Stores, kill_grace_s: float = KILL_GRACE_S) -> None:
        self._stores = stores
        self._jobs = stores.jobs
        self.kill_grace_s = kill_grace_s
        self._unsent: set[tuple[str, str]] = set()
        """Members with a launch that is not in their node's queue yet."""

    def assigned(self, job: Job) -> None:
        """Record every assigned member without a launch, also from an earlier hub process."""
        for member in job.processes:
            if member.state == MemberState.ASSIGNED:
                self._unsent.add((job.job, member.member))

    async def send(self) -> None:
        """Put the commands for assigned members into the queues of their nodes, each once."""
        for name, member_name in sorted(self._unsent):
            job = self._jobs.find(name)  # one that ended may be deleted already
            member = job.process(member_name) if job is not None else None
            if (
                job is not None
                and member is not None
                and job.state == JobState.RUNNING
                and member.state == MemberState.ASSIGNED
            ):
                token = await self._stores.auth.issue_job_token(
                    name, member=member_name, attempt=member.attempt
                )
                command = Launch(
                    job=name,
                    member=member_name,
                    slot=member.slot,
                    token=token,
                    spec=job.text,
                    files=await self._jobs.files_of(name),
                    attempt=member.attempt,
                )
                await self._stores.queue.put(
                    f"node/{member.node}",
                    key=f"{name}/{member_name}/{member.attempt}",
                    payload=pack_command(command),
                )
            self._unsent.discard((name, member_name))

    async def end(self, job: Job, member: str, *, grace_s: float | None = None) -> None:
        """Make a member's node end its process: SIGTERM, then SIGKILL after a grace period."""
        record = job.process(member)
        if record is None:
            return
        grace_s = self.kill_grace_s if grace_s is None else grace_s
        await self._stores.queue.put(
            f"node/{record.node}",
            key=f"{job.job}/{member}/{record.attempt}/stop",
            payload=pack_command(Stop(job.job, member, grace_s, record.attempt)),
        )
