"""Which member serves which stage: the slowest stage decides the throughput of all.

SWARM Parallelism (Ryabinin et al. 2023, https://arxiv.org/abs/2301.11913), Algorithm 1, moves the
member with the shortest queue of the least loaded stage to the most loaded one.

Differs from the paper: loads are computed from measured seconds per row instead of being read off
the queues, which only break ties; and several moves may be planned together, because with two
equally slow stages no single move helps. Moves cost a download, so they must gain `LEAST_GAIN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.swarm.routing import BOTH

LEAST_GAIN = 1.05
"""Factor by which a plan has to raise the throughput of the slowest stage."""


@dataclass(frozen=True)
class Server:
    """A member as it serves its stage."""

    member: str
    row_s: float = 0.0
    """Seconds of one row in its present stage; 0: unknown."""
    queue: float = 0.0
    """Microbatches waiting at it."""
    free_bytes: int = 0
    """Its memory for a stage; 0: unknown, it fits all."""


@dataclass(frozen=True)
class Move:
    """A member that changes its stage."""

    member: str
    source: int
    target: int
    reason: str = field(default="", compare=False)
    """For people."""


@dataclass(frozen=True)
class Stages:
    """Who serves what.

    `costs` are the relative costs of a row per stage, `needs_bytes` the memory per stage; empty:
    equal, and unknown.
    """

    servers: Sequence[Sequence[Server]]
    costs: Sequence[float] = ()
    needs_bytes: Sequence[int] = ()

    def cost(self, stage: int) -> float:
        """Return the relative cost of a row."""
        return self.costs[stage] if self.costs else 1.0

    def fits(self, server: Server, stage: int) -> bool:
        """Return whether a stage fits into a member's memory, as far as that is known."""
        needs = self.needs_bytes[stage] if self.needs_bytes else 0
        return not server.free_bytes or server.free_bytes >= needs

    def speeds(self) -> dict[str, float]:
        """Return the members' rows per second in a stage of cost 1; the mean where unknown."""
        known = {
            server.member: self.cost(stage) / server.row_s
            for stage, servers in enumerate(self.servers)
            for server in servers
            if server.row_s > 0
        }
        usual = sum(known.values()) / len(known) if known else 1.0
        every = [server.member for servers in self.servers for server in servers]
        return {member: known.get(member, usual) for member in every}

    def throughputs(self) -> list[float]:
        """Return the rows per second of every stage; 0 for a stage without members."""
        speeds = self.speeds()
        return [
            sum(speeds[server.member] for server in servers) / self.cost(stage)
            for stage, servers in enumerate(self.servers)
        ]


@dataclass
class _Draft:
    """Places while a plan is made."""

    stages: Stages
    speeds: Mapping[str, float]
    places: list[list[Server]]
    moves: list[Move] = field(default_factory=list)

    def loads(self) -> list[float]:
        return [
            sum(self.speeds[server.member] for server in servers) / self.stages.cost(stage)
            for stage, servers in enumerate(self.places)
        ]

    def after(self, server: Server, source: int, target: int) -> list[float]:
        loads, speed = self.loads(), self.speeds[server.member]
        loads[source] -= speed / self.stages.cost(source)
        loads[target] += speed / self.stages.cost(target)
        return loads

    def candidates(self, target: int) -> list[tuple[Server, int]]:
        """Return the members that may move there, and their stages, which keep a member."""
        moved = {move.member for move in self.moves}
        return [
            (server, source)
            for source, servers in enumerate(self.places)
            if source != target and len(servers) > 1
            for server in servers
            if server.member not in moved and self.stages.fits(server, target)
        ]

    def best(self, target: int) -> tuple[list[float], Server, int] | None:
        """Return the member whose move there is best, its stage, and the loads after it, sorted.

        Of equally good ones it is the one with the shortest queue.
        """
        options = [
            ((sorted(self.after(server, source, target)), -server.queue, server.member), server,
             source)
            for server, source in self.candidates(target)
        ]  # fmt: skip
        if not options:
            return None
        (after, _, _), server, source = max(options, key=lambda option: option[0])
        return after, server, source

    def move(self, server: Server, source: int, target: int) -> None:
        self.places[source].remove(server)
        self.places[target].append(server)
        self.moves.append(Move(server.member, source, target))


def plan_moves(stages: Stages) -> list[Move]:
    """Return moves that together raise the throughput of the slowest stage; none if nothing does.

    No move leaves a stage without members, and a stage without any is served first.
    """
    draft = _Draft(stages, stages.speeds(), [list(servers) for servers in stages.servers])
    start = min(draft.loads())
    slowest = draft.loads().index(start)
    best: list[Move] = []
    gained = start
    while len(draft.moves) < sum(map(len, stages.servers)):
        loads = draft.loads()
        target = loads.index(min(loads))
        found = draft.best(target)
        if found is None or found[0] <= sorted(loads):
            break
        draft.move(*found[1:], target)
        if min(draft.loads()) > max(gained, start * LEAST_GAIN):
            best, gained = list(draft.moves), min(draft.loads())
    reason = f"stage {slowest} had the fewest members"
    if any(server.row_s for servers in stages.servers for server in servers):
        rates = f"{rate_text(start / BOTH)} -> {rate_text(gained / BOTH)} rows/s"
        reason = f"stage {slowest} was the slowest: {rates}"
    return [replace(move, reason=reason) for move in best]


def rate_text(per_s: float) -> str:
    """Return a rate for people: whole numbers from 10 on, else two digits."""
    return f"{per_s:.0f}" if per_s >= 10 or not per_s else f"{per_s:.2g}"


def fill_empty(stages: Stages, empty: Sequence[int]) -> list[Move]:
    """Return moves that give each of these empty stages a member, if others can spare one."""
    draft = _Draft(stages, stages.speeds(), [list(servers) for servers in stages.servers])
    for target in empty:
        found = draft.best(target)
        if found is not None:
            draft.move(*found[1:], target)
    return [replace(move, reason=f"stage {move.target} had no member") for move in draft.moves]


def place(server: Server, stages: Stages) -> int:
    """Return the stage for a newcomer: the slowest that fits it; -1: none does."""
    loads = stages.throughputs()
    fitting = [stage for stage in range(len(loads)) if stages.fits(server, stage)]
    return min(fitting, key=lambda stage: loads[stage], default=-1)
