"""Who takes part at a parameter server, how fast each is, and whom nobody waits for; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.codec.base import Packet
from atoll.wire.parameter_server_messages import Answer, Ask

SPEED_MEMORY = 0.5
"""Share of the newest measurement in a member's speed."""

Reply = tuple[Answer, Packet | None]


@dataclass(slots=True)
class WorkerClock:
    """One member, as a server knows it."""

    state: str = "engaged"
    """`engaged` (a push will come), `resting` (before an anchor) or `lost`."""
    final: bool = False
    clock: int = 0
    """Clocks that it has finished."""
    seq: int = -1
    """Of its last push."""
    reply: Reply | None = None
    """To that push; None while it is held back."""
    speed: float = 0.0
    """Steps per second; 0: not measured."""
    read: Tensor | None = None
    """The vector that it computes on, where late gradients are compensated."""
    waiting: Ask | None = None
    """An ask that is answered later."""


class WorkerClocks:
    """The members of one server since it was loaded."""

    def __init__(
        self, members: Sequence[str] = (), *, speeds: Mapping[str, float] | None = None
    ) -> None:
        """Expect asks of `members`, in the order of their slots; `speeds` are known already."""
        known = speeds if speeds is not None else {}
        self.workers = {member: WorkerClock(speed=known.get(member, 0.0)) for member in members}

    @property
    def speeds(self) -> dict[str, float]:
        """Return every member's steps per second."""
        return {member: worker.speed for member, worker in self.workers.items()}

    def enter(self, member: str) -> WorkerClock:
        """Return a member that asks just now; one that was lost is back."""
        worker, slowest = self.workers.setdefault(member, WorkerClock("lost")), self.slowest()
        if worker.state != "engaged":  # the others went on, or wait: it begins where they are
            worker.clock = slowest
        worker.state, worker.final = "engaged", False
        return worker

    def slowest(self) -> int:
        """Return the least number of clocks finished by a member that will push again."""
        clocks = [worker.clock for worker in self.workers.values() if worker.state == "engaged"]
        return min(clocks, default=max((p.clock for p in self.workers.values()), default=0))

    @property
    def engaged(self) -> list[str]:
        """Members whose pushes are to come."""
        return [m for m, worker in self.workers.items() if worker.state == "engaged"]

    @property
    def present(self) -> int:
        """Members that are not lost, at least 1."""
        return max(1, sum(worker.state != "lost" for worker in self.workers.values()))

    @property
    def hurry(self) -> bool:
        """Whether somebody waits for the others in an anchor."""
        return any(p.state == "resting" and not p.final for p in self.workers.values())

    def measure(self, member: str, steps: int, busy_s: float) -> None:
        """Note how long a member took."""
        if steps > 0 and busy_s > 0:
            worker, speed = self.workers[member], steps / busy_s
            old = worker.speed or speed
            worker.speed = (1 - SPEED_MEMORY) * old + SPEED_MEMORY * speed

    def plan(self, member: str, every: int, *, dynamic: bool) -> tuple[int, int]:
        """Return the steps until a member's next push, and how far the schedule comes meanwhile.

        With `dynamic` a slow member does fewer steps, so that all push equally often: H_i =
        floor(v_i / max v_j H), at least 1.
        """
        own = self.workers[member].speed
        speeds = [p.speed for p in self.workers.values() if p.state != "lost" and p.speed]
        if not own or not speeds:
            return every, every
        steps = max(1, int(own / max(speeds) * every + 1e-9)) if dynamic else every
        mean = sum(speeds) / len(speeds)
        return steps, max(1, round(steps * mean / own))
