"""Places jobs on nodes, and decides when a job has ended and how."""

from __future__ import annotations

import asyncio
from collections import Counter

from atoll.clock import Clock
from atoll.hub.allotting import WHOLE, Allotment, Ask, Key, Shortage, allot
from atoll.hub.checkpoints import Checkpoints
from atoll.hub.jobs import LIVE_STATES, Job, Member
from atoll.hub.launching import KILL_GRACE_S, Launching
from atoll.hub.membership import Membership
from atoll.hub.outcomes import given_up, outcome, program_failed
from atoll.hub.places import Places
from atoll.hub.policies import hear_directly, left_behind, outcome_of_policies
from atoll.hub.reducer_places import ReducerPlaces
from atoll.hub.reducers import Reducers
from atoll.hub.relaunch import Relaunches, failures_after, missing
from atoll.hub.rounds import Rounds
from atoll.hub.scaling import Scaling
from atoll.hub.session import Sessions
from atoll.hub.stores import Stores
from atoll.ids import member_id, session_id
from atoll.wire.messages import Stopping

__all__ = ["KILL_GRACE_S", "Placement"]

STANDS_STILL = "nothing of it runs just now: "
"""How the reason of a running job begins that lost its places."""

SETTLE_S = 10.0
"""After a restart of the hub with waiting jobs: how long its nodes may take to come back."""


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
        self._launching = Launching(stores=stores, kill_grace_s=kill_grace_s)
        self._scaling = Scaling(stores=stores, rounds=rounds, launching=self._launching)
        self._places = Places(jobs=stores.jobs, membership=membership, sessions=sessions)
        self._settled_at = 0.0
        """Until when the nodes of an earlier life of the hub may come back."""
        self._told: dict[str, Shortage] = {}
        """What was last said of each waiting job."""
        self._lock = asyncio.Lock()
        self._stop_at: dict[str, float] = {}
        """Monotonic time at which the members of a stopping job are ended."""
        self._give_up_at: dict[str, float] = {}
        """Monotonic time at which those that were ended count as stopped anyway."""
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
                self._launching.assigned(job)  # some commands may not have been written
        await self._launching.send()
        if any(job.state == "waiting" for job in self._jobs.list()):
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
        if record.state == "waiting":
            await self._jobs.set_state(job, "stopped", reason="it was stopped before it started")
        elif record.state == "running":
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
            elif record.state == "running":
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
        if record.state in ("running", "waiting"):
            return job
        nodes = record.nodes_wanted
        if spec:
            record = await self._jobs.replace_spec(job, spec)
        if record.nodes_wanted != nodes:
            await self._rounds.book.forget_leases(job)
        await self._begin_again(record, why="it is being placed")
        await self.schedule()
        return job

    async def _begin_again(self, record: Job, *, why: str) -> None:
        """Let a job wait for places, to go on from its newest complete checkpoint."""
        job = record.job
        round_ = await self._checkpoints.newest(job)
        await self._checkpoints.begin(job, resume_round=round_)
        start = max(0, round_)
        cursors = await self._rounds.book.cursors_at(job, start)
        for member in record.members.values():
            member.state, member.error, member.failures = "stopped", None, 0
            member.leaving, member.retried = False, 0
        await self._rounds.book.set_round(
            job, start, cursors,
            start_round=start, resume_round=round_, stopping=False, paused="", outsiders={},
            rescaling=False,
        )  # fmt: skip
        origin = f"the checkpoint of round {round_}" if round_ >= 0 else record.origin
        await self._stores.events.add(job, "resumed", f"goes on from {origin}")
        await self._jobs.set_state(job, "waiting", reason=why)

    # ------------------------------------------------------------------------ placing

    async def schedule(self) -> None:
        """Start waiting jobs and complete running ones as far as places are free."""
        async with self._lock:
            asks, before, pausing = await self._asks()
            if not asks:
                return
            settling = self._clock.monotonic() < self._settled_at
            allotment = allot(asks, self._places.now(pausing=pausing), settling=settling)
            for (name, slot), nodes in allotment.granted.items():
                job = self._jobs.get(name)
                if slot == WHOLE:
                    await self._start(job, nodes)
                else:
                    await self._relaunch(job, slot, nodes[0], before[name, slot])
            await self._explain(allotment)

    async def _asks(self) -> tuple[list[Ask], dict[Key, Member | None], set[tuple[str, str]]]:
        """Return who wants places, the members before them, and those that pause before that."""
        asks: list[Ask] = []
        before: dict[Key, Member | None] = {}
        pausing: set[tuple[str, str]] = set()
        for number, job in enumerate(self._jobs.list()[::-1]):
            if job.state == "waiting":
                least = job.min_nodes or job.nodes_wanted
                ask = Ask(
                    key=(job.job, WHOLE), want=self._places.want(job), least=least,
                    most=job.nodes_wanted, priority=job.priority, number=number,
                )  # fmt: skip
                asks.append(ask)
            elif job.state == "running" and not job.stopping:
                for slot in missing(job):
                    key, member = (job.job, slot), job.members.get(member_id(slot))
                    if member is not None and not await self._is_due(job, member):
                        if not given_up(member, job):
                            pausing.add((job.job, member.member))
                        continue
                    before[key] = member
                    asks.append(self._ask_again(job, key, member, number=number))
        return asks, before, pausing

    def _ask_again(self, job: Job, key: Key, before: Member | None, *, number: int) -> Ask:
        """Return what a running job asks for that lacks a process."""
        beside = Counter(m.node for m in job.members.values() if m.state in LIVE_STATES)
        return Ask(
            key=key, want=self._places.want(job), priority=job.priority, number=number,
            essential=beside.total() < max(1, job.min_nodes),
            avoid=before.node if before is not None else "", beside=beside,
        )  # fmt: skip

    async def _start(self, job: Job, nodes: list[str]) -> None:
        for slot, node in enumerate(nodes):
            await self._jobs.assign(job.job, member=member_id(slot), slot=slot, node=node)
        await self._jobs.set_state(job.job, "running")
        if not job.silent:
            await self._rounds.open(self._jobs.get(job.job), fresh=True)
        await self.reducers.need(job)
        self._launching.assigned(job)
        await self._launching.send()

    async def _explain(self, allotment: Allotment) -> None:
        """Say of every job that lacks places why; what only a figure changed is not written."""
        for name, shortage in allotment.short.items():
            job, told = self._jobs.get(name), self._told.get(name)
            self._told[name] = shortage
            news = told is None or told.headline != shortage.headline
            if job.state == "waiting" and news:
                await self._jobs.set_state(name, "waiting", reason=str(shortage))
                continue
            stands = "" if job.state == "waiting" else STANDS_STILL
            job.reason = f"{stands}{shortage}"
            if stands and news:
                await self._stores.events.add(name, "member-waits", job.reason)
        self._told = {name: self._told[name] for name in allotment.short if name in self._told}

    async def _is_due(self, job: Job, member: Member) -> bool:
        """Return whether a member that is not there is to be launched again now."""
        if given_up(member, job):
            if self._relaunches.first_time(job.job, member.member):
                text = (
                    f"{member.member} is given up: {member.failures + 1} launches in a row failed"
                )
                await self._stores.events.add(
                    job.job, "member-given-up", text, member=member.member
                )
            return False
        node = self._membership.nodes.get(member.node)
        return self._relaunches.due(
            job.job,
            member,
            node_is_there=node is not None and node.connected,
            may_return=self._rounds.may_return(job.job),
            silent=job.silent,
            program=program_failed(member, trainer=job.kind == "trainer"),
        )

    async def _relaunch(self, job: Job, slot: int, node: str, before: Member | None) -> None:
        """Put a new process in the place of a member that is not there."""
        name = member_id(slot)
        if before is not None and before.node != node and before.exit_code is None:
            await self._launching.end(job, name)  # it may live on there, unheard
        if job.reason.startswith(STANDS_STILL):
            job.reason = ""
        record = await self._jobs.assign(job.job, member=name, slot=slot, node=node)
        self._sessions.end(session_id(job.job, name))
        if before is not None:
            retried = before.retried + program_failed(before, trainer=job.kind == "trainer")
            await self._jobs.update_member(
                job.job, name, failures=failures_after(before), retried=retried
            )
            self._relaunches.launched(job.job, record)
        self._rounds.expect(job.job, name)
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
        if job:
            async with self._lock:
                await self._review(job)
        await self.schedule()

    async def _review(self, job: str) -> None:
        record = self._jobs.get(job)
        if record.state != "running":
            return
        if record.of_policies:
            end = outcome_of_policies(record)
        else:
            end = outcome(record, working=self._working(record))
        if end is None:
            if left_behind(record):
                await self._end_critic(record)
            return
        state, reason, error = end
        for member in list(record.members.values()):
            if member.state in LIVE_STATES:
                await self._launching.end(record, member.member)
                await self._jobs.update_member(job, member.member, state="stopped")
                self._sessions.end(session_id(job, member.member))
        again = record.rescaling and state == "stopped"
        if not again:
            await self._jobs.set_state(job, state, reason=reason, error=error)
        self._rounds.close(job)
        self._relaunches.forget(job)
        self._places.forget(job)
        self._stop_at.pop(job, None)
        self._give_up_at.pop(job, None)
        await self.reducers.stop(job)
        await self._stores.auth.revoke_job(job)
        if again:
            await self._jobs.update(job, deal=0)
            await self._rounds.book.forget_leases(job)
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
        for member in hear_directly(job):
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
            record for record in open_jobs if record.state == "running"
        ]:  # what a full disk interrupted is done now
            async with self._lock:
                met = record.silent or self._rounds.has(record.job)
                if record.state == "running" and not met:
                    await self._rounds.open(record, fresh=True)
                await self._review(record.job)
                if record.state == "running":
                    await self._scaling.send_away(record)
                    await self._forgive(record)
        await self.reducers.tick()
        if open_jobs:
            await self._launching.send()
            await self.schedule()
