"""Messages of members that come, take the committed state over, and go."""

from __future__ import annotations

from atoll.wire.message import Message


class Register(Message, frozen=True):
    """A member enters its job. `dial` are the host:port where its store listens, or empty."""

    dial: list[str] = []
    state: list[str] = []
    """host:port where it serves the committed state to newcomers; empty: only through the hub."""


class Lease(Message, frozen=True):
    """A stretch of the data that one member trains on until the next verdict.

    `cursor` is the place where the slot stands in the committed record; empty: its beginning.
    """

    slot: int
    cursor: dict[str, int] = {}


class Registered(Message, frozen=True):
    """Answer: the slot it leases, and where the group stands."""

    slot: int
    num_slots: int
    committed_round: int
    """Rounds committed so far; the next one to join."""
    stopping: bool
    resume_round: int = -1
    """Round of the checkpoint to start from; -1: start fresh."""
    recover: bool = False
    """The run is under way: take over the committed state before the first step (`Recover`)."""
    lease: Lease | None = None
    """What to train on until the first verdict; None: the own slot from its beginning."""


class Recover(Message, frozen=True):
    """Ask: I lack the committed state; who has it?"""

    failed: list[str] = []
    """Members that gave nothing usable in this recovery."""
    ready: bool = True
    """It can load the state as soon as it has it: rounds may wait for that. Not while it is still
    starting and only fetches ahead."""


class Source(Message, frozen=True):
    """A live member that stands on the committed state."""

    member: str
    state: list[str] = []
    """host:port where it serves it; empty: only through the hub."""


class Sources(Message, frozen=True):
    """Answer to `Recover`. Rounds wait (a bounded time) for whoever asked."""

    round: int
    """Rounds committed: the state to take, and the next round to join."""
    peers: list[Source] = []
    """In slot order. Empty: take the checkpoint."""
    checkpoint_round: int = -1
    """The newest complete checkpoint. Without peers the run is set back to it; -1: start fresh."""
    pace: float = 1.0
    """Share of a period's steps to do before the next round, so as to arrive with the others."""
    lease: Lease | None = None


class Standing(Message, frozen=True):
    """A member tells: I have taken over the committed state, and stand on it."""

    round: int
    base: str
    sources: list[str] = []
    """Who gave it: members, or `checkpoint`."""
    seconds: float = 0.0
    nbytes: int = 0


class Leaving(Message, frozen=True):
    """A member tells that it leaves for good, e.g. on a preemption notice; nobody waits for it."""

    reason: str = ""


class Stopping(Message, frozen=True):
    """Notice to a member that meets in no rounds: the job is to end; finish, save and leave."""

    job: str


class Drain(Message, frozen=True):
    """A node tells that it will go away soon: give it no new work (or, `False`, again)."""

    draining: bool = True
    reason: str = ""
