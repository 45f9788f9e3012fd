"""A simulated hub whose rounds are those of the real service, with its database."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.errors import GroupError
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.rounds.service import RoundService
from atoll.hub.rounds.store import RoundStore
from atoll.rounds.machine import RoundMachine
from atoll.simulate.exchange import Exchange
from atoll.simulate.hub import TICK_S, SimulatedHub
from atoll.simulate.member import SimulatedMember
from atoll.simulate.record import Record, RoundRow
from atoll.simulate.scheduler import Process, Scheduler
from atoll.simulate.setting import Setting
from atoll.simulate.world import World
from atoll.wire.messages import MemberLost, RoundJoin, RoundPlan, RoundVote, Verdict
from tests.faults.simulation.disk import JOB, Disk, SimulatedDatabase, SimulatedEvents
from tests.faults.simulation.loop import VirtualLoop

SPEC = """
[job]
name = "simulated"
nodes = {members}
min_nodes = {least}
route = "{route}"
quorum = {quorum}
[train]
steps = 100
"""


class ServiceHub(SimulatedHub):
    """`RoundService`, `RoundStore` and SQLite on virtual time; the network is the simulation's."""

    def __init__(self, scheduler: Scheduler, setting: Setting, record: Record) -> None:
        super().__init__(scheduler, setting, record)
        process = Process(scheduler, "hub")
        loop: Any = VirtualLoop
        self.loop: VirtualLoop = loop(scheduler, process)
        text = SPEC.format(
            members=setting.wanted,
            least=setting.min_members,
            route=setting.route,
            quorum=float(setting.quorum),
        )
        self.disk = Disk(scheduler, spec=text)
        database: Any = SimulatedDatabase(self.disk, self.loop, process)
        events: Any = SimulatedEvents(self.disk)
        jobs = Jobs(database, events=events, jobs_dir=Path("/nonexistent"), clock=scheduler)
        store = RoundStore(database=database, jobs=jobs, clock=scheduler)
        self.service = RoundService(store=store, events=events, clock=scheduler, wire=self)
        self._do(self.service.open(jobs.get(JOB), fresh=True))
        self.loop.run_ready()
        self._until_open()
        self.service.runtime(JOB).machine.reducer_ready = True
        self.machine: RoundMachine = self.service.machine(JOB)
        scheduler.after(TICK_S, self._look)

    def _until_open(self) -> None:
        while JOB not in self.service.runtimes:
            assert self.scheduler.step(self.scheduler.now + 1.0)

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.create_task(work)

    def _look(self) -> None:
        self._do(self.service.tick())
        self.scheduler.after(TICK_S, self._look)

    # ---------------------------------------------------------------- what the service asks

    def notify(self, address: str, body: Any) -> bool:
        if isinstance(body, MemberLost) and address.endswith("/reducer") and self.exchange:
            self.exchange.drop(body.member)
        return True

    def get(self, address: str) -> Any:
        name = address.rpartition("/")[2]
        member = self.members.get(name)
        if member is None:
            return None
        last_seen = self.sessions.since_s.get(name, self.scheduler.now)
        return SimpleNamespace(connected=True, gone_since=0.0, last_seen=last_seen)

    # --------------------------------------------------------------------------- the events

    def launched(self, member: SimulatedMember) -> None:
        self.loop.run_ready()
        self.service.expect(JOB, member.name)

    def notice_silence(self) -> None:
        """Leave it to the service, which looks at its sessions."""

    def gone(self, member: SimulatedMember, *, left: bool = False) -> None:
        self.placement.lost(member.name, member.life, left=left)
        self._do(self.service.gone(JOB, member.name, lost=True))

    def join(self, member: SimulatedMember, body: RoundJoin) -> None:
        if not self.machine.joins and self.machine.attempt is None:
            self._first_join_s = self.scheduler.now
        self._do(self._join(member, body))

    async def _join(self, member: SimulatedMember, body: RoundJoin) -> None:
        life = member.life
        try:
            plan = await self.service.join(JOB, member.name, body)
        except GroupError as error:
            self._refuse(member, error)
            return
        exchange = self._exchange_of(plan)
        if member.life == life:
            self.tell("plan", member, plan, lambda: member.planned(plan, exchange))

    def _exchange_of(self, plan: RoundPlan) -> Exchange:
        if self.exchange is None or self.exchange.plan.epoch != plan.epoch:
            self.exchange = Exchange(self, plan)
            now = self.scheduler.now
            row = RoundRow(
                plan.round, plan.epoch, self._first_join_s, now, len(plan.members), plan.route
            )
            self._rows[plan.epoch] = row
            self.record.rows.append(row)
            self.scheduler.at(now + plan.timeout_s, self.exchange.time_out)
        return self.exchange

    def vote(self, member: SimulatedMember, body: RoundVote) -> None:
        self._do(self._vote(member, body))

    async def _vote(self, member: SimulatedMember, body: RoundVote) -> None:
        try:
            verdict = await self.service.vote(JOB, member.name, body)
        except GroupError as error:
            self._refuse(member, error)
            return
        self._verdict(verdict)
        self.tell("verdict", member, verdict, lambda: member.decided(verdict))

    def _verdict(self, verdict: Verdict) -> None:
        row = self._rows.pop(verdict.epoch, None)
        if row is None:
            return
        row.decided_s, row.committed = self.scheduler.now, verdict.committed
        row.contributors, row.reason = len(verdict.contributors), verdict.reason
        if verdict.committed:
            self.base = verdict.digest
            self.placement.committed(verdict.contributors)
        if self.exchange is not None and self.exchange.plan.epoch == verdict.epoch:
            self.exchange.closed = True
        waiting, self.undecided = self.undecided, []
        for answer in waiting:
            self.scheduler.after(self.setting.costs.recover_s, answer)

    def carry_out(self, effects: Any) -> None:
        """Let the service act on what a recovery changed."""
        found = list(effects)
        if found:
            self._do(self.service.carry_out(self.service.runtime(JOB), found))

    def close(self) -> None:
        self.loop.drop()
        self.disk.close()


def world_with_service(setting: Setting) -> World:
    """Return a world whose hub decides rounds by the real service."""
    return World(setting, hub=ServiceHub)
