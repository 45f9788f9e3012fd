"""Places jobs on nodes, and decides when and how a job has ended."""

from __future__ import annotations

import asyncio

from atoll.config import largest_member
from atoll.hub.jobs.completion import (
    RestartPolicy,
    covered_by_others,
    failures_after,
    outcome,
    reports_directly,
    rl_outcome,
    without_end,
)
from atoll.hub.jobs.jobs import Job
from atoll.hub.nodes.services import JobServices
from atoll.hub.scheduler.assign import WHOLE, Assignment, Shortfall, assign
from atoll.hub.scheduler.commands import KILL_GRACE_S, LaunchCommands
from atoll.hub.scheduler.follower_hosts import FollowerHosts
from atoll.hub.scheduler.reducer_clients import ReducerProcesses
from atoll.hub.scheduler.reducer_hosts import ReducerScheduler
from atoll.hub.scheduler.requests import CapacityView, PlacementRequests, failed_itself
from atoll.hub.scheduler.scaling import Scaling
from atoll.ids import follower_id, is_follower, member_id, session_id
from atoll.wire.messages import Stopping
from atoll.wire.part_check import Newest
from atoll.wire.states import JobState

__all__ = ["KILL_GRACE_S", "Scheduler"]

STANDS_STILL = "no process of it is running: "
"""Prefix of the reason of a running job without any process."""

SETTLE_S = 10.0
"""How long nodes may take to reconnect after a restart of the hub with waiting jobs."""


class Scheduler:
    """Submits, stops and resumes jobs, and watches them to their end."""

    def __init__(
        self,
        services: JobServices,
        *,
        reducers: ReducerProcesses | None,
        kill_grace_s: float = KILL_GRACE_S,
    ) -> None:
        """`reducers` is None when they are to run on nodes."""
        stores, sessions, membership = services.stores, services.sessions, services.membership
        rounds, clock = services.rounds, services.clock
        self._stores = stores
        self._jobs = stores.jobs
        self._sessions = sessions
        self._membership = membership
        self._rounds = rounds
        self._checkpoints = services.checkpoints
        self._clock = clock
        self._launching = LaunchCommands(stores=stores, kill_grace_s=kill_grace_s)
        self._scaling = Scaling(stores=stores, rounds=rounds, launching=self._launching)
        self._places = CapacityView(jobs=stores.jobs, membership=membership, sessions=sessions)
        self._settled_at = 0.0
        """Until when nodes of an earlier hub process may reconnect."""
        self._shortfalls: dict[str, Shortfall] = {}
        """The last reported reason of each waiting job."""
        self._lock = asyncio.Lock()
        self._stop_at: dict[str, float] = {}
        """Monotonic time at which the members of a stopping job are ended."""
        self._give_up_at: dict[str, float] = {}
        """Monotonic time at which these count as stopped without a report."""
        self.reducers = ReducerScheduler(services, beside=reducers)
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
        """Continue the running jobs of an earlier hub process."""
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
        async with self._lock:  # it may be about to start, or to end
            record = self._jobs.get(job)
            if record.state == JobState.WAITING:
                why = "cancelled before starting"
                await self._jobs.set_state(job, JobState.STOPPED, reason=why)
            elif record.state == JobState.RUNNING:
                await self._jobs.update(job, rescaling=False)
                await self._stores.events.add(job, "stopping", "stopped by operator")
                await self._begin_to_stop(record, grace_s=grace_s)
                self._tell_to_stop(record)
                for member in self._membership.live(job) if record.silent else []:
                    if not record.members[member].incarnation:  # it has no rounds to finish
                        await self._launching.end(record, member, grace_s=grace_s)

    async def _begin_to_stop(self, job: Job, *, grace_s: float) -> None:
        await self._jobs.update(job.job, stopping=True, grace_s=grace_s)
        for runtime in self._rounds.runtimes.of(job.job):
            # Several groups end together, after the round that `Meeting.last` marks.
            runtime.machine.stopping = not runtime.grouped
        self._stop_at[job.job] = self._clock.monotonic() + grace_s

    async def scale(self, job: str, *, least: int, most: int) -> None:
        """Change the minimum and maximum members of a waiting or running job.

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

    async def resume(self, job: str, *, spec: str = "", checkpoint: int | None = None) -> str:
        """Start an ended job again, from its newest undamaged checkpoint if there is one.

        Args:
            job: Which.
            spec: A changed job file to go on with; empty: the same.
            checkpoint: Round of another checkpoint; -1: none, the job begins again.

        Raises:
            ConfigError: the changed job file cannot go on where the job stands.
            CheckpointMissing: there is no such checkpoint.
            CheckpointCorrupt: that checkpoint, or every one of the job, is damaged.
        """
        record = self._jobs.get(job)
        if record.state in (JobState.RUNNING, JobState.WAITING):
            return job
        origin = await self._checkpoints.choose(job, round_=checkpoint)
        nodes = record.nodes_wanted
        if spec:
            record = await self._jobs.replace_spec(job, spec)
        if record.nodes_wanted != nodes:
            await self._rounds.store.forget_leases(job)
        await self._checkpoints.begin(job, resume=origin)
        await self._begin_again(record, origin, why="it is being placed")
        await self.schedule()
        return job

    async def _begin_again(self, record: Job, checkpoint: Newest, *, why: str) -> None:
        """Let a job wait for places, to continue from its newest checkpoint."""
        job, round_ = record.job, checkpoint.round
        await self._rounds.runtimes.meetings.begin_again(job)
        start = max(0, round_)
        cursors = await self._rounds.store.cursors_at(job, start)
        self._jobs.members.reset(job)
        await self._rounds.store.set_round(
            job, start, cursors,
            start_round=start, resume_round=round_, stopping=False, paused="", outsiders={},
            rescaling=False,
        )  # fmt: skip
        origin = f"the checkpoint of round {round_}" if round_ >= 0 else record.origin
        await self._stores.events.add(job, "resumed", f"continues from {origin}")
        await self._jobs.set_state(job, JobState.WAITING, reason=why)

    # ------------------------------------------------------------------------ placing

    async def schedule(self) -> None:
        """Start waiting jobs and complete running ones as far as places are free."""
        async with self._lock:
            requests = await self._asking.asks()
            if not requests.asks and not self._shortfalls:
                return
            settling = self._clock.monotonic() < self._settled_at
            places = self._places.now(pausing=requests.pausing)
            allotment = assign(requests.asks, places, settling=settling)
            for key, nodes in allotment.granted.items():
                job = self._jobs.get(key[0])
                if key[1] == WHOLE:
                    await self._start(job, nodes)
                    continue
                for name, node in zip(requests.lacking[key], nodes, strict=False):
                    await self._relaunch(job, name, node, slot=key[1])
            await self._explain(allotment)
            await self.followers.give_way(requests.short_islands(allotment.granted))

    async def _start(self, job: Job, nodes: list[str]) -> None:
        if largest_member(job.spec) is not job.spec:  # islands come first, one rank on each
            known = self._membership.nodes
            nodes = sorted(nodes, key=lambda node: -known[node].info.gpus if node in known else 0)
        for number, node in enumerate(nodes):
            slot, part = divmod(number, job.machines)
            name = follower_id(slot, part) if part else member_id(slot)
            await self._jobs.members.assign(job.job, member=name, slot=slot, node=node)
        await self._jobs.set_state(job.job, JobState.RUNNING)
        if not job.silent:
            await self._rounds.open(self._jobs.get(job.job), fresh=True)
        await self.reducers.need(job)
        self._launching.assigned(job)
        await self._launching.send()

    async def _explain(self, allotment: Assignment) -> None:
        """Report why a job lacks places; changes of figures only are not written."""
        for name, shortage in allotment.short.items():
            job, before = self._jobs.get(name), self._shortfalls.get(name)
            self._shortfalls[name] = shortage
            news = before is None or before.headline != shortage.headline
            if job.state == JobState.WAITING and news:
                await self._jobs.set_state(name, JobState.WAITING, reason=str(shortage))
                continue
            stands = "" if job.state == JobState.WAITING else STANDS_STILL
            job.reason = f"{stands}{shortage}"
            if stands and news:
                await self._stores.events.add(name, "member-waits", job.reason)
        for name in self._shortfalls.keys() - allotment.short.keys():
            found = self._jobs.find(name)
            if found is not None and found.reason.startswith(STANDS_STILL):
                found.reason = ""  # what it lacked has reconnected or has a place
        self._shortfalls = {
            name: self._shortfalls[name] for name in allotment.short if name in self._shortfalls
        }

    async def _relaunch(self, job: Job, name: str, node: str, *, slot: int) -> None:
        """Launch a new process for a missing member or follower."""
        before = job.process(name)
        elsewhere = before is not None and not before.live and before.node != node
        if before is not None and elsewhere and before.exit_code is None:
            await self._launching.end(job, name)  # it may still run there
        if before is not None and before.live:
            return  # it reconnected after the places were assigned
        if job.reason.startswith(STANDS_STILL):
            job.reason = ""
        record = await self._jobs.members.assign(
            job.job,
            member=name,
            slot=slot,
            node=node,
            failures=failures_after(before) if before else 0,
            retried=before.retried + failed_itself(before, job) if before else 0,
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
        """Launch reducers that did not reconnect in time after a restart of the hub."""
        await self.reducers.tick()

    # ------------------------------------------------------------------ the end of a job

    async def review(self, job: str) -> None:
        """Check whether a job has ended, and place what can start now."""
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
            absent = self._relaunches.absent(record)
            end = outcome(record, working=self._working(record), absent=absent)
        if end is None:
            if without_end(record):
                await self._end_critic(record)
            return
        state, reason, error = end
        if state == JobState.DONE and (text := covered_by_others(record)):
            await self._stores.events.add(job, "ended-by-others", text)
        for member in list(record.members.values()):
            if member.live:
                await self._launching.end(record, member.member)
                if member.live:  # it may have ended by itself meanwhile
                    await self._jobs.members.stopped(job, member.member)
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
            await self._jobs.update(job, data_slots=0)
            await self._rounds.store.forget_leases(job)
            newest = await self._checkpoints.go_back(record.job)
            await self._begin_again(record, newest, why="it restarts with other members")

    async def _end_critic(self, job: Job) -> None:
        """Stop a critic that waits for actors that will never be done; asks only once."""
        if job.job in self._stop_at or job.job in self._give_up_at:
            return
        self._stop_at[job.job] = self._clock.monotonic() + job.grace_s
        await self._stores.events.add(job.job, "critic-ends", "no actor is left: the critic stops")
        self._tell_to_stop(job)

    async def _forgive(self, job: Job) -> None:
        """Reset the failures of independent members that have worked for long."""
        for member in list(job.members.values()) if job.of_policies else []:
            if self._relaunches.steady(job.job, member):
                await self._jobs.members.update(job.job, member.member, failures=0, retried=0)

    def _tell_to_stop(self, job: Job) -> None:
        """Send the stop request to members outside of rounds."""
        for member in reports_directly(job):
            self._sessions.notify(session_id(job.job, member), Stopping(job.job))

    def _working(self, job: Job) -> set[str] | None:
        """Return the members that work, without those still recovering; None: all live ones."""
        working = self._rounds.working(job.job)
        if working is None or not job.silent:
            return working
        return working | {m.member for m in job.members.values() if not m.incarnation}

    async def tick(self) -> None:
        """End members after their grace period, and retry what failed; once a second."""
        now = self._clock.monotonic()
        for job in [job for job, at in self._stop_at.items() if now >= at]:
            if self._stop_at.pop(job, None) is None:
                continue  # it has ended meanwhile
            self._give_up_at[job] = now + 2 * self._launching.kill_grace_s
            record = self._jobs.get(job)
            for member in self._membership.live(job):
                await self._launching.end(record, member)
        for job in [job for job, at in self._give_up_at.items() if now >= at]:
            if self._give_up_at.pop(job, None) is None:
                continue
            for member in self._membership.live(job):
                await self._membership.give_up(job, member)
        open_jobs = [record for record in self._jobs.list() if not record.over]
        for record in [
            record for record in open_jobs if record.state == JobState.RUNNING
        ]:  # retry what a full disk interrupted
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
