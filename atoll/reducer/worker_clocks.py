"""Members of a parameter server: their clocks, speeds and states. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from atoll.codec.base import Packet
from atoll.wire.parameter_server_messages import Answer, Ask, region_of

SPEED_MEMORY = 0.5
"""Weight of the newest measurement in a member's speed."""
SLOWEST, FASTEST = 1e-6, 1e6
"""Steps per second that a member may claim: the plans of all members depend on its claim."""

Reply = tuple[Answer, Packet | None]


class WorkerState(StrEnum):
    """Whether a server waits for pushes of a member."""

    PUSHING = "pushing"
    """A push will follow."""
    IDLE = "idle"
    """None follows before the next anchor."""
    LOST = "lost"


@dataclass(slots=True)
class WorkerClock:
    """A server's record of one member."""

    state: WorkerState = WorkerState.PUSHING
    region: int = 0
    final: bool = False
    clock: int = 0
    seq: int = -1
    """Of its last push."""
    reply: Reply | None = None
    """Answer to that push; None while it is held back."""
    speed: float = 0.0
    """Steps per second; 0: not measured."""
    late: int = 0
    """Pushes of others expected before its next one: as many as there were before its last one."""
    read: Tensor | None = None
    """The vector that it computes on, kept if late gradients are compensated."""
    waiting: Ask | None = None
    """An ask without an answer yet."""


class WorkerClocks:
    """The members of one server since it was loaded."""

    def __init__(
        self,
        members: Sequence[str] = (),
        *,
        speeds: Mapping[str, float] | None = None,
        regions: int = 1,
    ) -> None:
        """Expect asks of `members`, in slot order; `speeds` are earlier measurements.

        A region has members of neighbouring slots; one that comes later goes to the smallest.
        """
        known, self._regions = speeds if speeds is not None else {}, regions
        self.workers = {
            member: WorkerClock(
                region=region_of(place, members=len(members), regions=regions),
                speed=known.get(member, 0.0),
            )
            for place, member in enumerate(members)
        }

    @property
    def speeds(self) -> dict[str, float]:
        """Every member's steps per second."""
        return {member: worker.speed for member, worker in self.workers.items()}

    def enter(self, member: str) -> WorkerClock:
        """Return the record of an asking member, which pushes (again) from now on."""
        if member not in self.workers:
            self.workers[member] = WorkerClock(WorkerState.LOST, self._smallest_region())
        worker = self.workers[member]
        if worker.state != WorkerState.PUSHING:  # the others' clocks have moved on
            worker.clock = self.slowest()
        worker.state, worker.final = WorkerState.PUSHING, False
        return worker

    def _smallest_region(self) -> int:
        there = [w.region for w in self.workers.values() if w.state != WorkerState.LOST]
        return min(range(self._regions), key=there.count)

    def slowest(self) -> int:
        """Return the lowest clock of a member that will push again."""
        clocks = [self.workers[member].clock for member in self.pushing]
        return min(clocks, default=max((p.clock for p in self.workers.values()), default=0))

    @property
    def pushing(self) -> list[str]:
        """Members that will push again."""
        return [m for m, worker in self.workers.items() if worker.state == WorkerState.PUSHING]

    @property
    def present(self) -> int:
        """Members that are not lost, at least 1."""
        return max(1, sum(worker.state != WorkerState.LOST for worker in self.workers.values()))

    @property
    def hurry(self) -> bool:
        """Whether a member waits for the others at a sync point."""
        return any(p.state == WorkerState.IDLE and not p.final for p in self.workers.values())

    def measure(self, member: str, steps: int, busy_s: float) -> None:
        """Record the duration of a member's steps; a speed that cannot be is ignored."""
        if steps > 0 and busy_s > 0 and SLOWEST <= steps / busy_s <= FASTEST:
            worker, speed = self.workers[member], steps / busy_s
            old = worker.speed or speed
            worker.speed = (1 - SPEED_MEMORY) * old + SPEED_MEMORY * speed

    def plan(self, member: str, every: int, *, dynamic: bool) -> tuple[int, int]:
        """Return the steps until a member's next push, and the schedule's progress in the meantime.

        With `dynamic` a slow member does fewer steps, so that all push equally often: H_i =
        floor(v_i / max v_j H), at least 1.
        """
        own = self.workers[member].speed
        speeds = [p.speed for p in self.workers.values() if p.state != WorkerState.LOST and p.speed]
        if not own or not speeds:
            return every, every
        steps = max(1, int(own / max(speeds) * every + 1e-9)) if dynamic else every
        mean = sum(speeds) / len(speeds)
        return steps, max(1, round(steps * mean / own))
