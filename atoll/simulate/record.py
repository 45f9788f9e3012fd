"""What happened in a simulation: members' time by cause, rounds, messages and queues."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Spent(StrEnum):
    """What a second of a member's machine went into."""

    USEFUL = "useful"
    """Optimizer steps that are part of a committed round."""
    WAITING = "waiting"
    """From its join to the plan, i.e. for the slowest."""
    COMMUNICATING = "communicating"
    """From the plan to the verdict."""
    LOST = "lost work"
    """Steps that no committed round contains: of a machine that failed, or came too late."""
    RECOVERING = "recovering"
    """Starting again, and taking over the state."""
    ABSENT = "absent"
    """Its machine had failed, and no other one had its place."""
    SPARE = "spare"
    """It is there and has no member, because enough others have."""


@dataclass(slots=True)
class RoundRow:
    """One attempt of a round. Times in seconds from the start."""

    round: int
    epoch: int
    first_join_s: float
    planned_s: float
    members: int
    route: str
    decided_s: float = 0.0
    committed: bool = False
    contributors: int = 0
    reason: str = ""


@dataclass
class Record:
    """The figures of one simulation, added up while it runs."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of all machines together, by `Spent`; hours that owners do not lend count nowhere."""
    rows: list[RoundRow] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)
    """Requests and notices of the hub, by kind."""
    control_bytes: Counter[str] = field(default_factory=Counter)
    """Their bytes as they are encoded, by kind."""
    measured_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Processor time of some of the round machine's events on this computer, by kind."""
    measured: Counter[str] = field(default_factory=Counter)
    """How many events that was."""
    events: Counter[str] = field(default_factory=Counter)
    """Left out, recovered, failed, ..."""
    worst: dict[str, float] = field(default_factory=dict)
    """Largest size of each queue."""
    paused_s: float = 0.0
    """For how long the job had fewer members than it needs."""
    placed: list[tuple[float, str, str]] = field(default_factory=list)
    """Each launch: when, which member, on which machine."""

    def deepest(self, queue: str, size: float) -> None:
        """Note the size of a queue."""
        if size > self.worst.get(queue, 0.0):
            self.worst[queue] = size


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulation; equal for equal settings and seeds, but for `measured`."""

    members: int
    """How many are wanted."""
    machines: int
    simulated_s: float
    ended: str
    """Why it ended before its time: the job was done, or has failed; empty: it did not."""
    steps: int
    """Of the schedule that committed rounds contain."""
    goodput: float
    """Share of the machines' lent time that went into steps of committed rounds; of spare machines
    no time counts."""
    shares: dict[str, float]
    """Shares of the lent time, by `Spent`; they add up to 1."""
    paused_s: float
    """For how long the job had fewer members than it needs."""
    least_members: int
    """Fewest members with a place since the job has begun."""
    mean_members: float
    rounds_committed: int
    rounds_aborted: int
    round_s: float
    """Median seconds from the first join of a round to its verdict; 0: no round."""
    member_bytes: float
    """Bytes of tensors that members sent, all together."""
    relay_bytes: float
    """Bytes that passed the hub, in and out."""
    control_bytes: float
    messages: dict[str, int]
    messages_per_s: float
    hub_share: float
    """Share of one processor that the hub's counted costs take."""
    hub_up_share: float
    hub_down_share: float
    """Share of the time that the hub's line is busy."""
    queues: dict[str, float]
    """Largest sizes: seconds of waiting for the hub's processor and line, bytes, joins."""
    events: dict[str, int]
    timeline: list[dict[str, Any]]
    """Attempts of rounds, thinned to at most 400."""
    measured: dict[str, Any]
    """Of this computer: seconds, microseconds per event of the round machine, memory."""
    notes: list[str]

    def figures(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        return asdict(self)


MOST_ROWS = 400


def timeline(rows: list[RoundRow]) -> list[dict[str, Any]]:
    """Return the rows of a timeline, thinned evenly."""
    every = -(-len(rows) // MOST_ROWS) if rows else 1
    return [
        {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in asdict(row).items()
        }
        for row in rows[::every]
    ]
