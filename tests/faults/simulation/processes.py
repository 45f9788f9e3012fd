"""Processes around members: node agents that launch them, and reducers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, DeadlineExceeded, HubError
from atoll.ids import REDUCER
from atoll.reducer.server import Reducer
from atoll.simulate.scheduler import Process
from atoll.wire.messages import (
    Launch,
    NodeInfo,
    ProcessState,
    QueueAck,
    QueueClaim,
    QueueItem,
    QueueItems,
    Stop,
    unpack_command,
)
from atoll.wire.states import ProcessPhase
from tests.faults.simulation.disk import JOB
from tests.faults.simulation.link import SimulatedLink
from tests.faults.simulation.network import Line
from tests.faults.simulation.threads import Event

if TYPE_CHECKING:
    from tests.faults.simulation.world import World

LEFT, KILLED = 75, -9


class Networked(Process):
    """A process with a line to the network and at most one session with the hub."""

    def __init__(self, world: World, name: str, line: Line) -> None:
        super().__init__(world.scheduler, name)
        self.world, self.line = world, line
        self.link: SimulatedLink | None = None
        self.doors: list[Any] = []
        """What serves other processes directly."""

    def connect(self, session: str, token: str, info: NodeInfo | None = None) -> SimulatedLink:
        self.link = SimulatedLink(
            self.world, self, session=session, token=token, line=self.line, info=info
        )
        return self.link

    def kill(self) -> None:
        if not self.alive:
            return
        super().kill()
        if self.link is not None:
            self.link.died()
        self.world.broke(self)
        self.world.fibers.reap(self)

    def leave(self, code: int) -> None:
        """End by itself."""
        self.kill()


class Child(Networked):
    """A process that an agent, or the hub, has started."""

    def __init__(self, world: World, name: str, line: Line, *, parent: Any, attempt: int) -> None:
        super().__init__(world, name, line)
        self.parent, self.attempt = parent, attempt
        self.code: int | None = None
        self.error: dict[str, str] | None = None

    def kill(self) -> None:
        if self.alive:
            self.code = KILLED if self.code is None else self.code
            super().kill()
            self.parent.ended(self)

    def leave(self, code: int) -> None:
        self.code = code
        self.kill()

    def terminate(self) -> None:
        """Be asked to end, as by SIGTERM."""
        self.leave(LEFT)


class ReducerProcess(Child):
    """The real reducer over a simulated link."""

    def begin(self, token: str) -> None:
        link: Any = self.connect(f"{JOB}/reducer", token)
        stop: Any = Event(self.world.fibers)

        def serve() -> None:
            try:
                Reducer(link, job=JOB).serve(stop=stop)
            except AtollError as error:
                self.world.note(f"{self.name} ends: {error}")
            self.leave(0)

        self.world.fibers.start(self, serve, "reducer")


class Node(Networked):
    """A machine's agent: takes commands from its queue, starts processes, tells how they end."""

    def __init__(self, world: World, name: str, *, slots: int) -> None:
        super().__init__(world, name, world.new_line())
        self.slots = slots
        self.children: dict[str, Child] = {}
        self.attempts: dict[str, int] = {}

    def begin(self) -> None:
        info = NodeInfo(
            hostname=self.name, system="x", python="3", atoll="0", torch="2", slots=self.slots
        )
        self.connect(self.name, "", info)
        self.world.fibers.start(self, self._serve, "agent")

    def _ask(self, body: Any, timeout_s: float) -> Any:
        if self.link is None:
            raise HubError("not connected")
        return self.link.request(body, timeout_s=timeout_s)

    def _serve(self) -> None:
        queue = f"node/{self.name}"
        while True:
            try:
                answer = self._ask(QueueClaim(queue, lease_s=30.0, limit=1, wait_s=20.0), 50.0)
                for item in answer.items if isinstance(answer, QueueItems) else []:
                    self._obey(item)
                    self._ask(QueueAck(queue, item.lease), 30.0)
            except DeadlineExceeded:
                continue
            except AtollError as error:
                self.world.note(f"{self.name} is refused: {error}")
                self.world.fibers.sleep(1.0)

    def _obey(self, item: QueueItem) -> None:
        command = unpack_command(item.payload)
        if isinstance(command, Launch):
            self._launch(command)
        elif isinstance(command, Stop):
            child = self.children.get(command.member)
            wanted = getattr(command, "attempt", 0)
            if child is not None and wanted in (0, child.attempt):
                child.terminate()
                self.scheduler.after(command.grace_s, child.kill, child)

    def _launch(self, command: Launch) -> None:
        member = command.member
        if self.attempts.get(member, 0) >= command.attempt and member != "reducer":
            return
        self.attempts[member] = command.attempt
        old = self.children.get(member)
        if old is not None:
            old.kill()
        child = self.world.make_child(command, parent=self)
        self.children[member] = child
        self._tell(child, ProcessPhase.STARTING)

    def ended(self, child: Child) -> None:
        """A child process has ended."""
        member = child.name.partition("#")[0]
        if self.children.get(member) is child:
            del self.children[member]
        if self.alive:
            self._tell(child, ProcessPhase.EXITED)

    def _tell(self, child: Child, state: ProcessPhase) -> None:
        member = child.name.partition("#")[0]
        body = ProcessState(
            JOB, member, state, exit_code=child.code if state == ProcessPhase.EXITED else None,
            error=child.error, attempt=child.attempt,
        )  # fmt: skip

        def tell() -> None:
            try:
                self._ask(body, 600.0)
            except AtollError as error:
                self.world.note(f"{self.name} could not tell {state} of {child.name}: {error}")

        self.world.fibers.start(self, tell, "tell")


class _Watcher:
    """The parent of a reducer beside the hub."""

    def __init__(self, reducers: SimulatedReducers) -> None:
        self._reducers = reducers

    def ended(self, child: Child) -> None:
        self._reducers.replace()


class SimulatedReducers:
    """Stands in for `Reducers`: one process beside the hub, started again when it ends."""

    def __init__(self, *, stores: Any, tasks: Any, **more: Any) -> None:
        from tests.faults.simulation.world import current

        self._world = current()
        self._stores, self._tasks = stores, tasks
        self._hub = self._world.starting_hub
        self._wanted: set[str] = set()
        self._running: ReducerProcess | None = None
        self.ended: Callable[[str, str], None] = lambda job, reducer: None
        """What the hub does when the process has ended."""

    def start(self, job: str, reducer: str = REDUCER) -> None:
        if job not in self._wanted:
            self._wanted.add(job)
            self._tasks.start(self._run(job), name="reducer")

    async def _run(self, job: str) -> None:
        try:
            token = await self._stores.auth.issue_job_token(job)
        except AtollError:  # e.g. the disk is full
            self._hub.loop.call_later(0.5, self._again)
            return
        await asyncio.sleep(self._world.start_up_s())
        if job in self._wanted and self._hub.alive:
            world = self._world
            name = f"reducer#{world.number()}"
            self._running = ReducerProcess(
                world, name, world.new_line(), parent=_Watcher(self), attempt=0
            )
            world.processes.append(self._running)
            self._hub.dependents.append(self._running)
            self._running.begin(token)

    def replace(self) -> None:
        """The process has ended: tell the hub, and start another after a pause."""
        if self._hub.alive and self._wanted:
            self._hub.loop.call_soon(self._tell)
            self._hub.loop.call_later(0.5, self._again)

    def _tell(self) -> None:
        for job in self._wanted:
            self.ended(job, REDUCER)

    def _again(self) -> None:
        for job in self._wanted:
            self._tasks.start(self._run(job), name="reducer again")

    async def stop(self, job: str) -> None:
        self._wanted.discard(job)
        if self._running is not None:
            self._running.kill()

    async def close(self) -> None:
        for job in list(self._wanted):
            await self.stop(job)
