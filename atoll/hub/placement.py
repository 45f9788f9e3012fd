"""Places jobs on nodes, and decides when a job has ended and how."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from atoll.clock import Clock
from atoll.hub.checkpoints import Checkpoints
from atoll.hub.jobs import LIVE_STATES, Job, Member
from atoll.hub.membership import Membership
from atoll.hub.reducer_places import ReducerPlaces
from atoll.hub.reducers import Reducers
from atoll.hub.relaunch import Relaunches, failures_after, given_up, missing
from atoll.hub.rounds import Rounds
from atoll.hub.session import Sessions
from atoll.hub.stores import Stores
from atoll.ids import member_id, session_id
from atoll.wire.messages import Launch, Stop, pack_command

FATAL_KINDS = frozenset(
    {"ScriptError", "ConfigError", "DataError", "LossNotFinite", "CheckpointCorrupt"}
)
"""Errors of the job itself: every member would meet them, so the first ends the job.

A process that was killed, ran out of memory or lost the hub is none of them."""

KILL_GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL when a process must end."""


def spread(free: Mapping[str, int], wanted: int) -> list[str]:
    """Return the node of each slot, as evenly as the free places allow; empty if too few are free.

    Among nodes with equally many members of the job, the one with more free places comes first.
    """
    if sum(free.values()) < wanted:
        return []
    taken: Counter[str] = Counter()
    chosen = []
    for _ in range(wanted):
        open_nodes = [node for node in free if free[node] > taken[node]]
        node = min(open_nodes, key=lambda n: (taken[n], taken[n] - free[n], n))
        taken[node] += 1
        chosen.append(node)
    return sorted(chosen)


def outcome(
    members: Mapping[str, Member],
    *,
    stopping: bool,
    working: Collection[str] | None = None,
) -> tuple[str, str, dict[str, str] | None] | None:
    """Return (state, reason, error) of a job that has ended, or None while it goes on.

    Args:
        members: Its members.
        stopping: A stop was asked for.
        working: Members that stand on the state of the group; the others that live are on their
            way to it and do not keep a job alive whose work is done. None: all that live.
    """
    for member in members.values():
        if member.error is not None and member.error.get("kind") in FATAL_KINDS:
            reason = f"{member.member}: {member.error.get('what', 'failed')}"
            return "failed", reason, member.error
    live = [member.member for member in members.values() if member.state in LIVE_STATES]
    done = any(member.state == "done" for member in members.values())
    if any(working is None or member in working for member in live) or (live and not done):
        return None
    if stopping:
        return "stopped", "a stop was asked for", None
    if done:
        return "done", "", None
    if not all(given_up(member) for member in members.values()):
        return None
    errors = [member.error for member in members.values() if member.error]
    return "failed", "every member was lost", errors[0] if errors else None


def place_again(free: Mapping[str, int], members: Mapping[str, Member], *, avoid: str = "") -> str:
    """Return the node for one more process of a job, or nothing if no place is free.

    The one with the fewest members of the job; one on which the last attempt ended comes last.
    """
    here = Counter(m.node for m in members.values() if m.state in LIVE_STATES)
    return min(free, key=lambda n: (n == avoid, here[n], -free[n], n), default="")


class Placement:
    """Submits, stops and resumes jobs, and watches them to their end."""

    def __init__(
        self,
        *,
        stores: Stores,
        sessions: Sessions,
        membership: Membership,
        rounds: Rounds,
        checkpoints: Checkpoints,
        clock: Clock,
        reducers: Reducers | None,
        kill_grace_s: float = KILL_GRACE_S,
    ) -> None:
        """`reducers` is None when they are to run on nodes."""
        self._stores = stores
        self._jobs = stores.jobs
        self._sessions = sessions
        self._membership = membership
        self._rounds = rounds
        self._checkpoints = checkpoints
        self._clock = clock
        self._kill_grace_s = kill_grace_s
        self._lock = asyncio.Lock()
        self._stop_at: dict[str, float] = {}
        """Monotonic time at which the members of a stopping job are ended."""
        self._give_up_at: dict[str, float] = {}
        """Monotonic time at which those that were ended count as stopped anyway."""
        self._unsent: set[tuple[str, str]] = set()
        """Members whose launch is not in the queue of their node yet."""
        self.reducers = ReducerPlaces(
            stores=stores,
            sessions=sessions,
            membership=membership,
            rounds=rounds,
            clock=clock,
            beside=reducers,
        )
        self._relaunches = Relaunches(clock=clock)

    async def restart(self) -> None:
        """Take up the running jobs of an earlier life of the hub."""
        for job in self._jobs.list():
            if job.state == "running":
                if not job.silent or any(m.incarnation for m in job.members.values()):
                    await self._rounds.open(job, fresh=False)
                if job.stopping:
                    self._stop_at[job.job] = self._clock.monotonic() + job.grace_s
                await self.reducers.take_up(job)
                for member in job.members.values():
                    if member.state == "assigned":  # its command may not have been written
                        self._unsent.add((job.job, member.member))
        await self._send_launches()
        await self.schedule()

    # ---------------------------------------------------------------- what people ask for

    async def submit(self, job: str) -> None:
        """Place a new job, or leave it waiting."""
        self._jobs.get(job)
        await self.schedule()

    async def stop(self, job: str, *, grace_s: float) -> None:
        """End a job: its members finish their round within `grace_s`, save and leave."""
        record = self._jobs.get(job)
        if record.state == "waiting":
            await self._jobs.set_state(job, "stopped", reason="it was stopped before it started")
        elif record.state == "running":
            await self._jobs.update(job, stopping=True, grace_s=grace_s)
            await self._stores.events.add(job, "stopping", "a stop was asked for")
            if self._rounds.has(job):
                self._rounds.machine(job).stopping = True
            self._stop_at[job] = self._clock.monotonic() + grace_s
            for member in self._membership.live(job) if record.silent else []:
                if not record.members[member].incarnation:  # it knows of no rounds to finish
                    await self._end_process(record, member, grace_s=grace_s)

    async def resume(self, job: str, *, spec: str = "") -> str:
        """Start a job that has ended again, from its newest complete checkpoint if it has one.

        Args:
            job: Which.
            spec: A changed job file to go on with; empty: the same.

        Raises:
            ConfigError: the changed job file cannot go on where the job stands.
        """
        record = self._jobs.get(job)
        if record.state in ("running", "waiting"):
            return job
        nodes = record.nodes_wanted
        if spec:
            record = await self._jobs.replace_spec(job, spec)
        if record.nodes_wanted != nodes:
            await self._rounds.book.forget_leases(job)
        round_ = await self._checkpoints.newest(job)
        await self._checkpoints.begin(job, resume_round=round_)
        start = max(0, round_)
        cursors = await self._rounds.book.cursors_at(job, start)
        for member in record.members.values():
            member.state, member.error, member.failures = "stopped", None, 0
            member.leaving = False
        await self._rounds.book.set_round(
            job, start, cursors,
            start_round=start, resume_round=round_, stopping=False, paused="", outsiders={},
        )  # fmt: skip
        origin = f"the checkpoint of round {round_}" if round_ >= 0 else "the beginning"
        await self._stores.events.add(job, "resumed", f"goes on from {origin}")
        await self._jobs.set_state(job, "waiting", reason="it is being placed")
        await self.schedule()
        return job

    # ------------------------------------------------------------------------ placing

    async def schedule(self) -> None:
        """Start waiting jobs and complete running ones as far as places are free.

        Running jobs come first, then the oldest.
        """
        async with self._lock:
            jobs = self._jobs.list()[::-1]
            for job in jobs:
                if job.state == "running":
                    await self._top_up(job)
            for job in jobs:
                if job.state == "waiting":
                    await self._try_start(job)

    async def _try_start(self, job: Job) -> None:
        free = self._membership.free_slots()
        wanted = job.nodes_wanted
        if job.min_nodes:
            wanted = max(job.min_nodes, min(wanted, sum(free.values())))
        nodes = spread(free, wanted)
        if not nodes:
            reason = f"needs {wanted} nodes, {sum(free.values())} are free"
            if job.reason != reason:
                await self._jobs.set_state(job.job, "waiting", reason=reason)
            return
        for slot, node in enumerate(nodes):
            await self._jobs.assign(job.job, member=member_id(slot), slot=slot, node=node)
        await self._jobs.set_state(job.job, "running")
        if not job.silent:
            await self._rounds.open(self._jobs.get(job.job), fresh=True)
        await self.reducers.need(job)
        for member in self._jobs.get(job.job).members.values():
            if member.state in LIVE_STATES:
                self._unsent.add((job.job, member.member))
        await self._send_launches()

    async def _top_up(self, job: Job) -> None:
        """Launch the members that a running job lacks, on nodes with free places."""
        if job.stopping or any(m.state == "done" for m in job.members.values()):
            return
        for slot in missing(job):
            before = job.members.get(member_id(slot))
            if before is not None and not await self._is_due(job, before):
                continue
            places = {n: free for n, free in self._membership.free_slots().items() if free}
            chosen = place_again(places, job.members, avoid=before.node if before else "")
            if chosen:
                await self._relaunch(job, slot, chosen, before)

    async def _is_due(self, job: Job, member: Member) -> bool:
        """Return whether a member that is not there is to be launched again now."""
        if given_up(member):
            if self._relaunches.first_time(job.job, member.member):
                text = (
                    f"{member.member} is given up: {member.failures + 1} launches in a row failed"
                )
                await self._stores.events.add(
                    job.job, "member-given-up", text, member=member.member
                )
            return False
        node = self._membership.nodes.get(member.node)
        there = node is not None and node.connected
        return self._relaunches.due(
            job.job, member, node_is_there=there, may_return=self._rounds.may_return(job.job)
        )

    async def _relaunch(self, job: Job, slot: int, node: str, before: Member | None) -> None:
        """Put a new process in the place of a member that is not there."""
        name = member_id(slot)
        if before is not None and before.node != node and before.exit_code is None:
            await self._end_process(job, name)  # it may live on there, unheard
        record = await self._jobs.assign(job.job, member=name, slot=slot, node=node)
        self._sessions.end(session_id(job.job, name))
        if before is not None:
            await self._jobs.update_member(job.job, name, failures=failures_after(before))
            self._relaunches.launched(job.job, record)
        self._rounds.expect(job.job, name)
        self._unsent.add((job.job, name))
        await self._send_launches()

    async def _send_launches(self) -> None:
        """Put the commands for assigned members into the queues of their nodes, each once."""
        for name, member_name in sorted(self._unsent):
            job = self._jobs.get(name)
            member = job.members[member_name]
            if job.state == "running" and member.state == "assigned":
                token = await self._stores.auth.issue_job_token(
                    name, member=member_name, attempt=member.attempt
                )
                command = Launch(
                    job=name,
                    member=member_name,
                    slot=member.slot,
                    token=token,
                    spec=job.spec,
                    files=await self._jobs.files_of(name),
                    attempt=member.attempt,
                )
                await self._stores.queue.put(
                    f"node/{member.node}",
                    key=f"{name}/{member_name}/{member.attempt}",
                    payload=pack_command(command),
                )
            self._unsent.discard((name, member_name))

    async def reducer_lost(self, job: str) -> None:
        """Replace a reducer that ran on a node."""
        await self.reducers.lost(job)

    async def reckon(self) -> None:
        """Look after what did not come back some time after a restart of the hub."""
        await self.reducers.tick()

    # ------------------------------------------------------------------ the end of a job

    async def review(self, job: str) -> None:
        """See whether a job has ended, and place what can start now."""
        if job:
            async with self._lock:
                await self._review(job)
        await self.schedule()

    async def _review(self, job: str) -> None:
        record = self._jobs.get(job)
        if record.state != "running":
            return
        working = self._working(record)
        members = {n: m for n, m in record.members.items() if m.slot < record.nodes_wanted}
        end = outcome(members, stopping=record.stopping, working=working)
        if end is None:
            return
        state, reason, error = end
        for member in list(record.members.values()):
            if member.state in LIVE_STATES:
                await self._end_process(record, member.member)
                await self._jobs.update_member(job, member.member, state="stopped")
                self._sessions.end(session_id(job, member.member))
        await self._jobs.set_state(job, state, reason=reason, error=error)
        self._rounds.close(job)
        self._relaunches.forget(job)
        self._stop_at.pop(job, None)
        self._give_up_at.pop(job, None)
        await self.reducers.stop(job)
        await self._stores.auth.revoke_job(job)

    def _working(self, job: Job) -> set[str] | None:
        """Return the members at work, not merely on their way to it; None: all that live."""
        working = self._rounds.working(job.job)
        if working is None or not job.silent:
            return working
        return working | {m.member for m in job.members.values() if not m.incarnation}

    async def tick(self) -> None:
        """End members whose grace is over, and complete what was left undone; once a second."""
        now = self._clock.monotonic()
        for job in [job for job, at in self._stop_at.items() if now >= at]:
            del self._stop_at[job]
            self._give_up_at[job] = now + 2 * self._kill_grace_s
            record = self._jobs.get(job)
            for member in self._membership.live(job):
                await self._end_process(record, member)
        for job in [job for job, at in self._give_up_at.items() if now >= at]:
            del self._give_up_at[job]
            for member in self._membership.live(job):
                await self._membership.give_up(job, member)
        running = [record for record in self._jobs.list() if record.state == "running"]
        for record in running:  # what a full disk interrupted is done now
            async with self._lock:
                met = record.silent or self._rounds.has(record.job)
                if record.state == "running" and not met:
                    await self._rounds.open(record, fresh=True)
                await self._review(record.job)
        await self.reducers.tick()
        if running:
            await self._send_launches()
            await self.schedule()

    async def _end_process(self, job: Job, member: str, *, grace_s: float | None = None) -> None:
        """Tell a member's node to end its process: asked first, killed after a grace."""
        grace_s = self._kill_grace_s if grace_s is None else grace_s
        record = job.members[member]
        await self._stores.queue.put(
            f"node/{record.node}",
            key=f"{job.job}/{member}/{record.attempt}/stop",
            payload=pack_command(Stop(job.job, member, grace_s, record.attempt)),
        )
