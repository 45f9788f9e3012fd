"""What is known of a job and of its members; changed through `Jobs` only."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.config.rl_seats import ACTOR
from atoll.errors import unknown
from atoll.hub.measures import Measures
from atoll.ids import is_hand, member_id

STATES = ("waiting", "running", "done", "failed", "stopped")
SAID = {state: {"running": "runs"}.get(state, state) for state in STATES}
"""How a state is said as an event."""

ENDED = frozenset({"done", "failed", "stopped"})
"""States in which nothing of a job runs any more."""

LIVE_STATES = frozenset({"assigned", "starting", "running"})
"""States of a member whose process is on its way or there."""

SILENT_KINDS = frozenset({"command", "container"})
"""Kinds of job whose processes need not speak to the hub."""


class Member(msgspec.Struct, kw_only=True):
    """One training process of a job, or its reducer."""

    member: str
    slot: int
    node: str
    state: str = "assigned"
    attempt: int = 1
    """Launches so far; grows when it is placed again."""
    failures: int = 0
    """Launches in a row that ended before a round was committed with them."""
    retried: int = 0
    """How often it was started again because its own program had failed."""
    incarnation: str = ""
    leaving: bool = False
    """It told that it leaves for good."""
    dial: list[str] = []
    """host:port where its store listens."""
    serves: list[str] = []
    """host:port where it serves the committed state."""
    exit_code: int | None = None
    error: dict[str, str] | None = None
    tail: list[str] = []
    """Last lines it printed, when it failed."""
    result: dict[str, Any] | None = None


class Job(msgspec.Struct, kw_only=True):
    """The whole record of a job. Change it through `Jobs` only."""

    job: str
    created: float
    spec: str = ""
    """TOML text with every default written out."""
    files: list[str] = []
    """Names of the texts that travel with it."""
    kind: str = "trainer"
    """`trainer`, `rl`, `script`, `command` or `container`."""
    priority: int = 0
    retries: int = 0
    """How often each process may fail by itself and is started again."""
    seats: list[dict[str, Any]] = []
    """By slot what each member does, where that differs: critic, or actor of which policy."""
    island: str = ""
    """How each member lies over its processes, e.g. `replicate=2 tensor=2`; empty: it is one."""
    inner: str = ""
    """How each member computes its steps, e.g. `fsdp, 4 ranks, bf16`; empty: plainly."""
    machines: int = 1
    """Places that each member takes: its own, and those of its hands."""
    hands: dict[str, Member] = {}
    """The further machines of islands, by name: no members, so no round and no rule of the job
    knows of them; `slot` is that of their member."""
    batch: str = ""
    """Label of the jobs that were submitted together."""
    key: str = ""
    """What the submitter called this submission; the same again is the same job."""
    nodes_wanted: int = 1
    min_nodes: int = 0
    """Below so many members it pauses; 0: all are needed to start, one to go on."""
    steps: int = 0
    seed: int = 0
    state: str = "waiting"
    reason: str = ""
    error: dict[str, str] | None = None
    members: dict[str, Member] = {}
    committed_round: int = 0
    start_round: int = 0
    """What `committed_round` was when it was started or resumed."""
    paused: str = ""
    """Why it does not go on just now."""
    deal: int = 0
    """Into how many slots the data is dealt, if not `nodes_wanted`: members came or went since."""
    rescaling: bool = False
    """It stops only to go on with another deal of the data."""
    leases: dict[int, dict[str, int]] = {}
    """Where every slot of the data stands in the committed record."""
    measures: Measures = msgspec.field(default_factory=Measures)
    outsiders: dict[str, int] = {}
    """Launches from before it was set back to a checkpoint; they have another history."""
    reducer_attempt: int = 0
    """Launches of its reducer so far."""
    aborted_rounds: int = 0
    started: float | None = None
    ended: float | None = None
    resume_round: int = -1
    stopping: bool = False
    grace_s: float = 10.0
    result: dict[str, Any] = {}

    @property
    def processes(self) -> list[Member]:
        """Its members and their hands: all that takes places on nodes."""
        return [*self.members.values(), *self.hands.values()]

    def process(self, name: str) -> Member | None:
        """Return the record of a member or a hand, if there is one."""
        return (self.hands if is_hand(name) else self.members).get(name)

    @property
    def origin(self) -> str:
        """From where it goes on that has no checkpoint, for people."""
        return "where each of its members stood" if self.kind == "rl" else "the beginning"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    @property
    def slots(self) -> int:
        """Into how many slots the data is dealt."""
        return self.deal or self.nodes_wanted

    @property
    def silent(self) -> bool:
        """Whether its processes may never speak to the hub: their node tells how they fare."""
        return self.kind in SILENT_KINDS

    @property
    def separate(self) -> bool:
        """Whether each of its processes works for itself, instead of meeting in rounds."""
        return self.of_policies or (self.silent and self.committed_round == 0)

    @property
    def of_policies(self) -> bool:
        """Whether its members are actors of policies, and maybe a critic."""
        return self.kind == "rl"

    @property
    def aside(self) -> frozenset[str]:
        """Members that take no part in rounds, if there are any: the critic of policies."""
        return frozenset(
            member_id(slot) for slot, seat in enumerate(self.seats) if seat["role"] != ACTOR
        )


def change_fields(target: Any, changes: dict[str, Any], known: frozenset[str]) -> None:
    """Set fields of a record; a wrong name is a bug of the caller and changes nothing."""
    for name in changes:
        if name not in known:
            raise unknown(f"field of a {type(target).__name__.lower()}", name, known)
    for name, value in changes.items():
        setattr(target, name, value)
