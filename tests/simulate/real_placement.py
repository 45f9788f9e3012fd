"""A simulated hub whose members are placed by the real scheduler, with its stores and database."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from atoll.hub.app import Hub, open_hub
from atoll.hub.options import HubOptions
from atoll.ids import session_id
from atoll.simulate.hub import SimulatedHub
from atoll.simulate.placement import Launch, Placement
from atoll.simulate.record import Record
from atoll.simulate.scheduler import BEGIN_S, Scheduler
from atoll.simulate.setting import Setting
from atoll.wire.messages import Leaving
from atoll.wire.states import MemberState

T = TypeVar("T")

SPEC = """
[job]
name = "simulated"
nodes = {members}
min_nodes = {least}
route = "relay"
on = {on}
[train]
steps = 100
"""


class RealPlacement(Placement):
    """`Scheduler`, `Membership` and `Jobs` of a hub, with the events of machines and processes."""

    folder = Path()
    """Where each has its database; set by `with_real_placement`."""

    def __init__(self, scheduler: Scheduler, setting: Setting, record: Record, **more: Any) -> None:
        super().__init__(scheduler, setting, record, **more)
        self.loop = asyncio.new_event_loop()
        options = HubOptions(data=self.folder / "data", jobs=self.folder / "runs", reducers=False)
        self.hub: Hub = self.do(open_hub(options, url="http://127.0.0.1:1", clock=scheduler))
        self.stores = self.hub.stores
        self.hub.rounds.may_return = lambda job: self._may_return()  # type: ignore[method-assign]
        self.spec = SPEC.format(
            members=setting.wanted, least=setting.min_members, on=list(setting.on)
        )
        self.name = ""
        self._attempts: dict[str, int] = {}

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what the hub does to its end; it takes no simulated time."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.do(self.stores.close())
        self.loop.close()

    def _session(self, address: str) -> Any:
        sessions: Any = self.hub.sessions
        return sessions._sessions.get(address)

    def _open(self, address: str, **more: Any) -> Any:
        job, _, member = address.rpartition("/")
        session = SimpleNamespace(
            address=address, job=job, member=member, stats={}, source="", connected=True,
            last_seen=self._scheduler.now, notify=lambda body: None, incarnation="one",
            info=None, **more,
        )  # fmt: skip
        sessions: Any = self.hub.sessions
        sessions._sessions[address] = session
        return session

    def _close(self, address: str) -> Any:
        sessions: Any = self.hub.sessions
        return sessions._sessions.pop(address, None)

    # ------------------------------------------------------------------ what the world reports

    def came(self, machine: str) -> None:
        session = self._open(machine)
        session.info, session.stats = self._infos[machine], self._stats[machine]
        self.do(self.hub.membership.node_opened(session))
        self._start_launched()

    def went(self, machine: str) -> None:
        session = self._close(machine)
        if session is not None:
            self.do(self.hub.membership.node_lost(session))
        self._start_launched()

    def connected(self, member: str, attempt: int) -> bool:
        process = self._job.members[member]
        if process.attempt != attempt or not process.live:
            return False
        self.do(self.hub.membership.member_opened(self._open(session_id(self.name, member))))
        return True

    def lost(self, member: str, attempt: int, *, left: bool = False) -> None:
        if self._job.members[member].attempt != attempt:
            return
        session = self._close(session_id(self.name, member))
        if session is not None:
            if left:
                self.do(self.hub.membership.leaving(session, Leaving(self.name)))
            self.do(self.hub.membership.member_lost(session))
        self._start_launched()

    def back(self, member: str, attempt: int) -> bool:
        process = self._job.members[member]
        if process.attempt != attempt or process.state != MemberState.LOST:
            return False
        self.do(self.hub.membership.member_opened(self._open(session_id(self.name, member))))
        return True

    def committed(self, members: Iterable[str]) -> None:
        for member in members:
            if self._job.members[member].failures:
                self.do(self.stores.jobs.members.update(self.name, member, failures=0))

    def member_on(self, machine: str) -> str:
        members = self._job.members.values() if self.name else ()
        return next((m.member for m in members if m.live and m.node == machine), "")

    def place(self) -> None:
        if not self.name:
            self.name = self.do(self.stores.jobs.create(self.spec, files={})).job
            self.do(self.hub.scheduler.submit(self.name))
            self._scheduler.at(BEGIN_S + 1.0, self._tick)
        self._start_launched()

    # --------------------------------------------------------------------------- what it does

    @property
    def _job(self) -> Any:
        return self.stores.jobs.get(self.name)

    def _tick(self) -> None:
        self.do(self.hub.scheduler.tick())
        self._start_launched()
        self._scheduler.after(1.0, self._tick)

    def _start_launched(self) -> None:
        """Start the processes for which the hub has put a command into a queue."""
        for process in list(self._job.members.values()) if self.name else ():
            name = process.member
            if process.attempt > self._attempts.get(name, 0):
                self._attempts[name] = process.attempt
                now = self._scheduler.now - BEGIN_S
                self._record.placed.append((now, name, process.node))
                self._launch(Launch(name, process.slot, process.attempt, process.node))


class HubWithScheduler(SimulatedHub):
    """A simulated hub with `RealPlacement`."""

    placing = RealPlacement
