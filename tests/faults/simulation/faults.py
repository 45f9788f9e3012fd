"""What can go wrong, when, and with whom: the matrix is the product of these lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from atoll.simulate.scheduler import Process
from tests.faults.simulation.member import Member
from tests.faults.simulation.network import Line
from tests.faults.simulation.processes import Networked

if TYPE_CHECKING:
    from tests.faults.simulation.world import World

ROUND = (
    "join wait", "plan told", "contributing", "reducing", "result", "voting",
    "verdict stored", "verdict told", "applying",
)  # fmt: skip
RECOVERY = (
    "recovering: asked", "recovering: manifest", "recovering: chunk", "recovering: loading",
    "recovering: standing",
)  # fmt: skip
CHECKPOINT = ("checkpoint: copy", "checkpoint: write", "checkpoint: publish")
PHASES = (*ROUND, *RECOVERY, *CHECKPOINT)
ROLES = ("worker", "reducer", "hub", "donor")
ROUTES = ("relay", "direct")
FAULTS = (
    "kill", "freeze", "cut", "dark", "slow", "duplicate", "reorder", "corrupt", "disk full",
    "clock jump",
)  # fmt: skip

SECONDS: dict[str, tuple[float, ...]] = {
    "kill": (0.1, 3.0, 12.0),
    "freeze": (1.0, 4.0, 9.0, 20.0),
    "cut": (0.0, 2.0, 7.0),
    "dark": (3.0, 8.0, 20.0),
    "slow": (4.0, 15.0),
    "duplicate": (5.0,),
    "reorder": (5.0,),
    "corrupt": (0.0,),
    "disk full": (0.7, 5.0),
    "clock jump": (0.0,),
}
"""How long each lasts; one of them, by the seed."""


@dataclass(frozen=True)
class Cell:
    """One fault in one phase of one role on one route."""

    fault: str
    phase: str
    role: str
    route: str

    def __str__(self) -> str:
        return f"{self.fault} / {self.phase} / {self.role} / {self.route}"


def exists(cell: Cell) -> bool:
    """Return whether there is such a thing: no donor where nobody recovers, and so on."""
    if cell.role == "reducer" and cell.route == "direct":
        return False
    if cell.role == "donor" and cell.phase not in RECOVERY[1:]:
        return False
    if cell.fault == "disk full":
        return cell.role == "hub" or (cell.role == "worker" and cell.phase in CHECKPOINT)
    return True


def matrix() -> list[Cell]:
    """Return every cell that exists."""
    cells = (Cell(*parts) for parts in product(FAULTS, PHASES, ROLES, ROUTES))
    return [cell for cell in cells if exists(cell)]


# ------------------------------------------------------------------------------------ doing it


def target_of(world: World, role: str, reached: Process) -> Process | None:
    """Return the process that a fault of a role hits, when `reached` came to the phase."""
    if role == "hub":
        return world.hub if world.hub is not None and world.hub.alive else None
    if role == "reducer":
        return world.reducer()
    members = [m for m in world.members() if m.link is not None]
    if role == "donor":
        wanted = reached.donor if isinstance(reached, Member) else ""
        donors = [m for m in members if m is not reached and m.id == (wanted or m.id)]
        return world.random.choice(donors) if donors else None
    if isinstance(reached, Member) and reached.alive and world.random.random() < 0.7:
        return reached
    return world.random.choice(members) if members else None


class Faults:
    """Does faults to a world, and knows when the last one is over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.over = world.scheduler.now
        self.done: list[str] = []

    def strike(self, fault: str, process: Process) -> None:
        """Let one fault happen to a process now."""
        world = self.world
        seconds = world.random.choice(SECONDS[fault])
        self.over = max(self.over, world.scheduler.now + seconds)
        world.note(f">> {fault} of {process}, {seconds} s")
        self.done.append(f"{fault} of {process} for {seconds} s")
        acts: dict[str, Callable[[Process, float], None]] = {
            "kill": self._kill, "freeze": self._freeze, "cut": self._cut, "dark": self._dark,
            "slow": self._slow, "duplicate": self._duplicate, "reorder": self._reorder,
            "corrupt": self._corrupt, "disk full": self._fill, "clock jump": self._jump,
        }  # fmt: skip
        acts[fault](process, seconds)

    def _kill(self, process: Process, seconds: float) -> None:
        is_hub = process is self.world.hub
        process.kill()
        if is_hub:
            self.world.scheduler.after(seconds, self.world.start_hub)

    def _freeze(self, process: Process, seconds: float) -> None:
        process.stop()
        self.world.scheduler.after(seconds, process.go_on)
        if process is self.world.hub:
            self._watch_all()

    def _watch_all(self) -> None:
        for other in self.world.processes:
            if other.alive and other.link is not None:
                other.link.watch()

    def _lines(self, process: Process) -> list[Line]:
        if isinstance(process, Networked):
            return [process.line]
        return [self.world.hub_line]

    def _connections(self, process: Process) -> Iterator[Any]:
        for other in self.world.processes:
            near = other is process or process is self.world.hub
            connection = other.link.connection if other.link is not None else None
            if near and other.alive and connection is not None:
                yield connection

    def _cut(self, process: Process, seconds: float) -> None:
        for line in self._lines(process):
            line.refused_until = self.world.scheduler.now + seconds
        for connection in list(self._connections(process)):
            connection.cut()
        if process is not self.world.hub:
            self.world.broke(process)

    def _corrupt(self, process: Process, seconds: float) -> None:
        self._cut(process, 0.0)  # either side ends a connection whose bytes make no sense

    def _dark(self, process: Process, seconds: float) -> None:
        for line in self._lines(process):
            line.dark_since = self.world.scheduler.now
            line.dark_until = max(line.dark_until, line.dark_since + seconds)
        if process is self.world.hub:
            self._watch_all()
        elif isinstance(process, Networked) and process.link is not None:
            process.link.watch()

    def _slow(self, process: Process, seconds: float) -> None:
        self._change(process, seconds, bps=30_000.0, delay_s=0.25)

    def _reorder(self, process: Process, seconds: float) -> None:
        self._change(process, seconds, jitter_s=0.6)

    def _duplicate(self, process: Process, seconds: float) -> None:
        lines = [o.line for o in self.world.processes if o is process or process is self.world.hub]
        for line in lines:
            line.twice_until = self.world.scheduler.now + seconds
        self._cut(process, 0.0)  # what was asked is asked again, under the same id

    def _change(self, process: Process, seconds: float, **changes: float) -> None:
        for line in self._lines(process):
            before = {name: getattr(line, name) for name in changes}
            for name, value in changes.items():
                setattr(line, name, value)

            def restore(line: Line = line, before: dict[str, float] = before) -> None:
                for name, value in before.items():
                    setattr(line, name, value)

            self.world.scheduler.after(seconds, restore)

    def _fill(self, process: Process, seconds: float) -> None:
        until = self.world.scheduler.now + seconds
        if isinstance(process, Member):
            process.disk_full_until = until
        else:
            self.world.disk.full_until = until

    def _jump(self, process: Process, seconds: float) -> None:
        process.wall_offset_s += self.world.random.choice((-7200.0, -60.0, 60.0, 7200.0))
