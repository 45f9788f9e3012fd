"""One simulated cluster: a hub, machines, members, a network, and everything that goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from atoll.errors import AuthError
from atoll.hub.security.auth import Identity
from atoll.simulate.scheduler import BEGIN_S, Process, Scheduler
from atoll.wire.messages import Launch, RoundJoin, RoundVote
from tests.faults.simulation import patches
from tests.faults.simulation.disk import JOB, Disk
from tests.faults.simulation.fibers import Fiber, Fibers
from tests.faults.simulation.hub import HubLife
from tests.faults.simulation.link import SimulatedLink
from tests.faults.simulation.member import Member
from tests.faults.simulation.network import UP, Connection, Line
from tests.faults.simulation.oracle import Oracle
from tests.faults.simulation.processes import Child, Networked, Node, ReducerProcess
from tests.faults.simulation.state import Replica
from tests.faults.simulation.threads import Threading

SPEC = """
[job]
name = "simulated"
nodes = {members}
min_nodes = {least}
route = "{route}"
[train]
steps = 100
"""

TRACE = 400


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a world is like before anything goes wrong."""

    members: int = 3
    least: int = 1
    route: str = "relay"
    rounds: int = 4
    reducers_beside_hub: bool = True
    checkpoint_every: int = 2
    uneven: bool = False
    """One member is half as fast as the others."""
    spare: int = 1
    """Machines more than members."""


_worlds: list[World] = []


def current() -> World:
    """Return the world that is being simulated."""
    return _worlds[-1]


class World:
    """See the module's docstring."""

    def __init__(self, seed: int | str, setting: Setting) -> None:
        self.seed, self.setting = seed, setting
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self.trace: list[str] = []
        self.oracle = Oracle(self)
        self.fibers = Fibers(self.scheduler, self._fiber_failed)
        self.threading = Threading(self.fibers)
        spec = SPEC.format(members=setting.members, least=setting.least, route=setting.route)
        self.disk = Disk(self.scheduler, spec=spec)
        self.route, self.rounds_wanted = setting.route, setting.rounds
        self.checkpoint_every = setting.checkpoint_every
        self.reducers_beside_hub = setting.reducers_beside_hub
        self.hub_options: dict[str, Any] = {}
        self.stores: dict[str, Any] = {}
        self.meetings: dict[Any, dict[str, Any]] = {}
        self.processes: list[Networked] = []
        self.rewinds: list[int] = []
        self.phases: set[str] = set()
        self.on_phase: Callable[[str, str, Process], None] = lambda who, phase, process: None
        self.hub: HubLife | None = None
        self.hub_line = Line(self.scheduler, delay_s=0.0, jitter_s=0.0)
        self.nobody = Process(self.scheduler, "nobody")
        self.starting_hub: Any = None
        self._numbers = 0
        self.disk.on_event = self._happened

    # -------------------------------------------------------------------------- small things

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.scheduler.now - BEGIN_S:9.3f}  {text}")
        if len(self.trace) > 2 * TRACE:
            del self.trace[:TRACE]

    def new_line(self) -> Line:
        random = self.random.random
        return Line(self.scheduler, delay_s=0.001 + 0.02 * random(), jitter_s=0.02 * random())

    def step_s(self, member: str) -> float:
        slow = self.setting.uneven and member == "w1"
        return (0.12 if slow else 0.06) * (0.9 + 0.2 * self.random.random())

    def start_up_s(self) -> float:
        """Return how long a process needs to import what it needs."""
        return 0.1 + 0.4 * self.random.random()

    def _fiber_failed(self, fiber: Fiber, error: BaseException) -> None:
        self.oracle.complain(f"{fiber.name} of {fiber.process} raised {error!r}")
        import traceback

        self.note("".join(traceback.format_exception(error)[-3:]))

    # ---------------------------------------------------------------------------- life, death

    def start_hub(self) -> None:
        if self.hub is None or not self.hub.alive:
            self.note("the hub starts")
            self.hub = HubLife(self)

    def start_node(self, name: str) -> None:
        node = Node(self, name, slots=1)
        self.processes.append(node)
        node.begin()

    def make_child(self, command: Launch, *, parent: Node) -> Child:
        """Start the process that a launch asks for."""
        name = f"{command.member}#{command.attempt}.{self.number()}"
        child: Member | ReducerProcess
        if command.member == "reducer":
            child = ReducerProcess(self, name, self.new_line(), parent=parent, attempt=0)
        else:
            child = Member(self, name, parent=parent, attempt=command.attempt)
        self.note(f"{parent.name} launches {name}")
        self.processes.append(child)
        self.scheduler.after(self.start_up_s(), lambda: child.begin(command.token), child)
        return child

    def broke(self, process: Process) -> None:
        """All connections of a process to other processes than the hub end."""
        self.note(f"connections of {process} end")
        for store in list(self.stores.values()):
            if store.process is process and not process.alive:
                del self.stores[store.dial]
            elif store.process is not process:
                self.tell_broken(store, process)
            elif process.alive:
                for other in list(self.stores.values()):
                    if other is not store:
                        self.tell_broken(store, other.process)
        for member in self.members():
            if member is not process:
                self.scheduler.after(0.01, lambda m=member: m.broke(process), member)  # type: ignore[misc]
            else:
                for other in list(member.waiting_for):
                    member.broke(other)

    def tell_broken(self, store: Any, process: Process) -> None:
        """Let one side of a direct connection find out that the other is gone."""
        delay_s = 0.005 + 0.02 * self.random.random()
        self.scheduler.after(delay_s, lambda: store.broke(process), store.process)

    def members(self) -> list[Member]:
        """Return the member processes that are alive."""
        return [p for p in self.processes if isinstance(p, Member) and p.alive]

    def member(self, name: str) -> Member | None:
        """Return the newest living process of a member."""
        return next((m for m in reversed(self.members()) if m.id == name), None)

    def reducer(self) -> ReducerProcess | None:
        """Return the newest living reducer."""
        found = [p for p in self.processes if isinstance(p, ReducerProcess) and p.alive]
        return found[-1] if found else None

    # -------------------------------------------------------------------------------- network

    def dial(self, link: SimulatedLink) -> Connection | None:
        """Open a connection to the hub for a link."""
        hub, line = self.hub, link.line
        if hub is None or not hub.alive or self._refused(line):
            self.scheduler.after(0.01, lambda: link.refused(None), link.process)
            return None
        connection = Connection(
            self.scheduler, client=(link.process, link, line), server=(hub, hub, self.hub_line)
        )
        connection.send(("hello", link, None), UP)
        return connection

    def _refused(self, line: Line) -> bool:
        now = self.scheduler.now
        return now < line.refused_until or now < self.hub_line.refused_until

    def identify(self, hub: HubLife, link: SimulatedLink) -> Identity:
        """Return whom a token belongs to, as the hub's endpoint finds it out.

        Raises:
            AuthError: the token or the process is not wanted any more.
        """
        if "/" not in link.session:
            return Identity("node", link.session)
        auth = hub.stores.auth
        identity = auth.authenticate(link.token)
        if not auth.may_open_session(identity, link.session):
            raise AuthError("this token may not open this session", given=link.session)
        sessions = cast(Any, hub.sessions)
        for check in (getattr(sessions, "admit", None),):
            if check is not None:
                check(link.session, link.incarnation)
        return identity

    def hub_answers(self) -> bool:
        return self.hub is not None and self.hub.running

    def asked(self, link: SimulatedLink, body: Any) -> None:
        """A process asks the hub something."""
        if isinstance(body, RoundJoin):
            self.reached("member", "join wait", link.process)
        elif isinstance(body, RoundVote):
            self.reached("member", "voting", link.process)

    def relaying(self, link: SimulatedLink, to: str) -> None:
        """A process sends something through the hub."""
        if to.endswith("/reducer"):
            self.reached("member", "contributing", link.process)

    def delivering(self, link: SimulatedLink, source: str) -> None:
        """Something relayed has come to a process."""
        if source.endswith("/reducer"):
            self.reached("member", "result", link.process)
        elif link.session.endswith("/reducer"):
            member = self.member(source.rpartition("/")[2])
            if member is not None:
                self.reached("member", "reducing", member)

    def reached(self, who: str, phase: str, process: Process) -> None:
        """Something interesting begins: faults wait for this."""
        self.phases.add(phase)
        self.on_phase(who, phase, process)
        self.fibers.here()

    def round(self) -> int:
        """Return how many rounds any member has seen committed."""
        return max(self.oracle.history.digests, default=-1) + 1

    def checkpoint(self, round_: int) -> Replica:
        """Return the state of a complete checkpoint."""
        data = self.disk.files[f"checkpoints/round-{round_:06d}/shared.safetensors"]
        return Replica.from_bytes(data)

    # -------------------------------------------------------------------------------- running

    def job_state(self) -> str:
        """Return the state of the job as it is on disk."""
        hub = self.hub
        if hub is not None and hub.alive and hub.stores.jobs.get(JOB).state == "running":
            return "running"
        row = self.disk.connection.execute("SELECT record FROM jobs").fetchone()
        text: str = row[0]
        begin = text.index('"state":"') + 9
        return text[begin : text.index('"', begin)]

    def begin(self) -> None:
        """Start the hub and the machines; the job is there already."""
        self.start_hub()
        for index in range(self.setting.members + self.setting.spare):
            name = f"n{index}"
            self.scheduler.after(0.05 * self.random.random(), lambda n=name: self.start_node(n))  # type: ignore[misc]

    def run(self, *, limit_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass until the job has ended and its processes are gone; False: too long."""
        deadline = self.scheduler.now + limit_s
        check = 0
        while self.scheduler.step(deadline):
            check += 1
            if check % 16 == 0:
                self._check_hub()
                if until is not None and until():
                    return True
                if until is None and self.job_state() in ("done", "failed", "stopped"):
                    return True
        self._check_hub()
        return until() if until is not None else self.job_state() == "done"

    def _happened(self, kind: str, text: str) -> None:
        """Put what the hub says into the trace, and look for what should not be."""
        self.note(f"[{kind}] {text}")
        if kind == "alarm:rewound":
            self._rewound(text)
        elif kind.startswith("alarm"):
            self.oracle.complain(f"{kind}: {text}")

    def _check_hub(self) -> None:
        if self.hub is not None:
            for context in self.hub.loop.errors:
                self.oracle.complain(f"the hub's loop: {context}")
            self.hub.loop.errors.clear()

    def _rewound(self, text: str) -> None:
        to = int(text.rpartition(" ")[2])
        self.rewinds.append(to)
        self.oracle.rewound(to)

    def close(self) -> None:
        """Unwind every fiber and forget the rest."""
        for process in self.processes:
            if process.alive:
                Process.kill(process)
            self.fibers.reap(process)
        if self.hub is not None and self.hub.alive:
            Process.kill(self.hub)
            self.hub.loop.drop()
        while self.scheduler.step(self.scheduler.now):
            pass
        self.disk.close()


@contextmanager
def simulated(seed: int | str, setting: Setting) -> Iterator[World]:
    """Put the modules under test into a new world."""
    threads = torch.get_num_threads()
    world = World(seed, setting)
    _worlds.append(world)
    quiet = logging.getLogger("atoll")
    level, quiet.level = quiet.level, logging.CRITICAL + 1
    logging.disable(logging.CRITICAL)
    try:
        with patches.installed(world):
            yield world
            world.close()
    finally:
        logging.disable(logging.NOTSET)
        quiet.level = level
        _worlds.pop()
        torch.set_num_threads(threads)


__all__ = ["Setting", "World", "current", "simulated"]
