"""Places jobs on nodes, and decides when a job has ended and how."""

from __future__ import annotations

import asyncio

from atoll.clock import Clock
from atoll.hub.jobs.completion import (
    RestartPolicy,
    failures_after,
    outcome,
    reports_directly,
    rl_outcome,
    without_end,
)
from atoll.hub.jobs.jobs import Job
from atoll.hub.nodes.membership import Membership
from atoll.hub.rounds.service import RoundService
from atoll.hub.scheduler.assign import WHOLE, Assignment, Shortfall, assign
from atoll.hub.scheduler.commands import KILL_GRACE_S, LaunchCommands
from atoll.hub.scheduler.follower_hosts import FollowerHosts
from atoll.hub.scheduler.reducer_clients import ReducerProcesses
from atoll.hub.scheduler.reducer_hosts import ReducerScheduler
from atoll.hub.scheduler.requests import CapacityView, PlacementRequests, failed_itself
from atoll.hub.scheduler.scaling import Scaling
from atoll.hub.sessions.session import Sessions
from atoll.hub.storage.checkpoints import Checkpoints
from atoll.hub.stores import Stores
from atoll.ids import follower_id, is_follower, member_id, session_id
from atoll.wire.messages import Stopping
from atoll.wire.states import JobState, MemberState

__all__ = ["KILL_GRACE_S", "Scheduler"]

STANDS_STILL = "nothing of it runs just now: "
"""How the reason of a running job begins that lost its places."""

SETTLE_S = 10.0
"""After a restart of the hub with waiting jobs: how long its nodes may take to come back."""


class Scheduler:
    """Submits, stops and resumes jobs, and watches them to their end."""

    def __init__(
        self,
        *,
        stores: Stores,
        sessions: Sessions,
        membership: Membership,
        rounds: RoundService,
        checkpoints: Checkpoints,
        clock: Clock,
        reducers: ReducerProcesses | None,
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
        self._launching = LaunchCommands(stores=stores, kill_grace_s=kill_grace_s)
        self._scaling = Scaling(stores=stores, rounds=rounds, launching=self._launching)
        self._places = CapacityView(jobs=stores.jobs, membership=membership, sessions=sessions)
        self._settled_at = 0.0
        """Until when the nodes of an earlier life of the hub may come back."""
        self._told: dict[str, Shortfall] = {}
        """What was last said of each waiting job."""
        self._lock = asyncio.Lock()
        self._stop_at: dict[str, float] = {}
        """Monotonic time at which the members of a stopping job are ended."""
        self._give_up_at: dict[str, float] = {}
        """Monotonic time at which those that were ended count as stopped anyway."""
        self.reducers = ReducerScheduler(
            stores=stores,
            sessions=sessions,
            membership=membership,
            rounds=rounds,
            clock=clock,
            beside=reducers,
        )
        self._relaunches = RestartPolicy(clock=clock)
        self.followers = FollowerHosts(
            jobs=stores.jobs,
            membership=membership,
            launching=self._launching,
            relaunches=self._relaunches,
            events=stores.events,
            clock=clock,
        )
        self._asking = PlacementRequests(
            jobs=stores.jobs,
            events=stores.events,
            membership=membership,
            places=self._places,
            rounds=rounds,
            relaunches=self._relaunches,
        )

    async def restart(self) -> None:
        """Take up the running jobs of an earlier life of the hub."""
        for job in self._jobs.list():
            if job.state == JobState.RUNNING:
                if not job.silent or any(m.incarnation for m in job.members.values()):
                    await self._rounds.open(job, fresh=False)
                if job.stopping:
                    self._stop_at[job.job] = self._clock.monotonic() + job.grace_s
                await self.reducers.take_up(job)
                self._launching.assigned(job)  # some commands may not have been written
        await self._launching.send()
        if any(job.state == JobState.WAITING for job in self._jobs.list()):
            self._settled_at = self._clock.monotonic() + SETTLE_S
        await self.schedule()

    # ---------------------------------------------------------------- what people ask for

    async def submit(self, job: str) -> None:
        """Place a new job, or leave it waiting."""
        self._jobs.get(job)
        await self.schedule()

    async def stop(self, job: str, *, grace_s: float) -> None:
        """End a job: its members finish their round within `grace_s`, save and leave."""
        record = self._jobs.get(job)
        if record.state == JobState.WAITING:
            await self._jobs.set_state(
                job, JobState.STOPPED, reason="it was stopped before it started"
            )
        elif record.state == JobState.RUNNING:
            await self._jobs.update(job, rescaling=False)
            await self._stores.events.add(job, "stopping", "a stop was asked for")
            await self._begin_to_stop(record, grace_s=grace_s)
            self._tell_to_stop(record)
            for member in self._membership.live(job) if record.silent else []:
                if not record.members[member].incarnation:  # it knows of no rounds to finish
                    await self._launching.end(record, member, grace_s=grace_s)

    async def _begin_to_stop(self, job: Job, *, grace_s: float) -> None:
        await self._jobs.update(job.job, stopping=True, grace_s=grace_s)
        if self._rounds.has(job.job):
            self._rounds.machine(job.job).stopping = True
        self._stop_at[job.job] = self._clock.monotonic() + grace_s

    async def scale(self, job: str, *, least: int, most: int) -> None:
        """Let a job that waits or runs have other bounds of members from now on.

        Raises:
            ConfigError: it has ended, or there cannot be so many.
        """
        async with self._lock:
            record = self._jobs.get(job)
            if await self._scaling.scale(record, least=least, most=most) and not record.stopping:
                await self._jobs.update(job, rescaling=True)
                await self._begin_to_stop(record, grace_s=self._scaling.grace_s(record))
            elif record.state == JobState.RUNNING:
                await self.reducers.need(record)
                await self._scaling.send_away(record)
        await self.schedule()

    async def resume(self, job: str, *, spec: str = "") -> str:
        """Start a job that has ended again, from its newest complete checkpoint if it has one.

        Args:
            job: Which.
            spec: A changed job file to go on with; empty: the same.

        Raises:
            ConfigError: the changed job file cannot go on where the job stands.
        """
        record = self._jobs.get(job)
        if record.state in (JobState.RUNNING, JobState.WAITING):
            return job
        nodes = record.nodes_wanted
        if spec:
            record = await self._jobs.replace_spec(job, spec)
        if record.nodes_wanted != nodes:
            await self._rounds.store.forget_leases(job)
        await self._begin_again(record, why="it is being placed")
        await self.schedule()
        return job

    async def _begin_again(self, record: Job, *, why: str) -> None:
        """Let a job wait for places, to go on from its newest complete checkpoint."""
        job = record.job
        round_ = await self._checkpoints.newest(job)
        await self._checkpoints.begin(job, resume_round=round_)
        start = max(0, round_)
        cursors = await self._rounds.store.cursors_at(job, start)
        for member in record.processes:
            member.state, member.error, member.failures = MemberState.STOPPED, None, 0
            member.leaving, member.retried = False, 0
        await self._rounds.store.set_round(
            job, start, cursors,
            start_round=start, resume_round=round_, stopping=False, paused="", outsiders={},
            rescaling=False,
        )  # fmt: skip
        origin = f"the checkpoint of round {round_}" if round_ >= 0 else record.origin
        await self._stores.events.add(job, "resumed", f"goes on from {origin}")
        await self._jobs.set_state(job, JobState.WAITING, reason=why)

    # ------------------------------------------------------------------------ placing

    async def schedule(self) -> None:
        """Start waiting jobs and complete running ones as far as places are free."""
        async with self._lock:
            asked = await self._asking.asks()
            if not asked.asks and not self._told:
                return
            settling = self._clock.monotonic() < self._settled_at
            places = self._places.now(pausing=asked.pausing)
            allotment = assign(asked.asks, places, settling=settling)
            for key, nodes in allotment.granted.items():
                job = self._jobs.get(key[0])
                if key[1] == WHOLE:
                    await self._start(job, nodes)
                    continue
                for name, node in zip(asked.lacking[key], nodes, strict=False):
                    await self._relaunch(job, name, node, slot=key[1])
            await self._explain(allotment)
            await self.followers.give_way(asked.short_islands(allotment.granted))

    async def _start(self, job: Job, nodes: list[str]) -> None:
        for number, node in enumerate(nodes):
            slot, part = divmod(number, job.machines)
            name = follower_id(slot, part) if part else member_id(slot)
            await self._jobs.assign(job.job, member=name, slot=slot, node=node)
        await self._jobs.set_state(job.job, JobState.RUNNING)
        if not job.silent:
            await self._rounds.open(self._jobs.get(job.job), fresh=True)
        await self.reducers.need(job)
        self._launching.assigned(job)
        await self._launching.send()

    async def _explain(self, allotment: Assignment) -> None:
        """Say of every job that lacks places why; what only a figure changed is not written."""
        for name, shortage in allotment.short.items():
            job, told = self._jobs.get(name), self._told.get(name)
            self._told[name] = shortage
            news = told is None or told.headline != shortage.headline
            if job.state == JobState.WAITING and news:
                await self._jobs.set_state(name, JobState.WAITING, reason=str(shortage))
                continue
            stands = "" if job.state == JobState.WAITING else STANDS_STILL
            job.reason = f"{stands}{shortage}"
            if stands and news:
                await self._stores.events.add(name, "member-waits", job.reason)
        for name in self._told.keys() - allotment.short.keys():
            found = self._jobs.find(name)
            if found is not None and found.reason.startswith(STANDS_STILL):
                found.reason = ""  # what it lacked has come back by itself, or has a place
        self._told = {name: self._told[name] for name in allotment.short if name in self._told}

    async def _relaunch(self, job: Job, name: str, node: str, *, slot: int) -> None:
        """Put a new process in the place of a member or hand that is not there."""
        before = job.process(name)
        if before is not None and before.node != node and before.exit_code is None:
            await self._launching.end(job, name)  # it may live on there, unheard
        if job.reason.startswith(STANDS_STILL):
            job.reason = ""
        record = await self._jobs.assign(job.job, member=name, slot=slot, node=node)
        if before is not None:
            retried = before.retried + failed_itself(before, job)
            await self._jobs.update_member(
                job.job, name, failures=failures_after(before), retried=retried
            )
            self._relaunches.launched(job.job, record)
        if not is_follower(name):
            self._sessions.end(session_id(job.job, name))
            self._rounds.expect(job.job, name)
            self.followers.rendezvous.close(job.job, name)
        self._launching.assigned(job)
        await self._launching.send()

    async def reducer_lost(self, job: str, reducer: str) -> None:
        """Replace a reducer that ran on a node."""
        await self.reducers.lost(job, reducer)

    async def reckon(self) -> None:
        """Look after what did not come back some time after a restart of the hub."""
        await self.reducers.tick()

    # ------------------------------------------------------------------ the end of a job

    async def review(self, job: str) -> None:
        """See whether a job has ended, and place what can start now."""
        record = self._jobs.find(job)
        if record is not None and record.state == JobState.RUNNING:
            await self.followers.look_after(record)
            async with self._lock:
                await self._review(job)
        await self.schedule()

    async def _review(self, job: str) -> None:
        record = self._jobs.find(job)
        if record is None or record.state != JobState.RUNNING:
            return
        if record.of_policies:
            end = rl_outcome(record)
        else:
            end = outcome(record, working=self._working(record))
        if end is None:
            if without_end(record):
                await self._end_critic(record)
            return
        state, reason, error = end
        for member in list(record.members.values()):
            if member.live:
                await self._launching.end(record, member.member)
                await self._jobs.update_member(job, member.member, state=MemberState.STOPPED)
                self._sessions.end(session_id(job, member.member))
        await self.followers.end_all(record)
        again = record.rescaling and state == JobState.STOPPED
        if not again:
            await self._jobs.set_state(job, state, reason=reason, error=error)
        self._rounds.close(job)
        self._relaunches.forget(job)
        self._stop_at.pop(job, None)
        self._give_up_at.pop(job, None)
        await self.reducers.stop(job)
        await self._stores.auth.revoke_job(job)
        if again:
            await self._jobs.update(job, deal=0)
            await self._rounds.store.forget_leases(job)
            await self._begin_again(record, why="it starts again with other members")

    async def _end_critic(self, job: Job) -> None:
        """Let the critic end that waits for actors which will never be done; ask only once."""
        if job.job in self._stop_at or job.job in self._give_up_at:
            return
        self._stop_at[job.job] = self._clock.monotonic() + job.grace_s
        await self._stores.events.add(job.job, "critic-ends", "no actor is left: the critic ends")
        self._tell_to_stop(job)

    async def _forgive(self, job: Job) -> None:
        """Count the failures of members anew that meet in no rounds and have worked for long."""
        for member in list(job.members.values()) if job.of_policies else []:
            if self._relaunches.steady(job.job, member):
                await self._jobs.update_member(job.job, member.member, failures=0, retried=0)

    def _tell_to_stop(self, job: Job) -> None:
        """Tell those who meet in no rounds, where they would hear of it."""
        for member in reports_directly(job):
            self._sessions.notify(session_id(job.job, member), Stopping(job.job))

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
            self._give_up_at[job] = now + 2 * self._launching.kill_grace_s
            record = self._jobs.get(job)
            for member in self._membership.live(job):
                await self._launching.end(record, member)
        for job in [job for job, at in self._give_up_at.items() if now >= at]:
            del self._give_up_at[job]
            for member in self._membership.live(job):
                await self._membership.give_up(job, member)
        open_jobs = [record for record in self._jobs.list() if not record.over]
        for record in [
            record for record in open_jobs if record.state == JobState.RUNNING
        ]:  # what a full disk interrupted is done now
            await self.followers.look_after(record)
            async with self._lock:
                met = record.silent or self._rounds.has(record.job)
                if record.state == JobState.RUNNING and not met:
                    await self._rounds.open(record, fresh=True)
                await self._review(record.job)
                if record.state == JobState.RUNNING:
                    await self._scaling.send_away(record)
                    await self._forgive(record)
        await self.reducers.tick()
        if open_jobs:
            await self._launching.send()
            await self.schedule()
