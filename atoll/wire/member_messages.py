"""Messages of members that join, recover the committed state, and leave."""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.wire.message import Digest, Finite, Message, Name, Number

MOST_ADDRESSES, MOST_PLACES = 64, 256
"""Addresses of one member, and parts of its position in the data: the hub sends them to all members
in one message."""

Addresses = Annotated[list[Name], msgspec.Meta(max_length=MOST_ADDRESSES)]
ShortName = Annotated[str, msgspec.Meta(max_length=64)]


class Register(Message, frozen=True):
    """A member enters its job; `dial`: host:port at which its store listens, or empty."""

    dial: Addresses = []
    state: Addresses = []
    """host:port at which it serves the committed state; empty: only through the hub."""
    identity: Digest = ""
    """SHA-256 of the public key with which it meets other members, hexadecimal; empty: none."""


class Lease(Message, frozen=True):
    """The data that one member trains on until the next verdict.

    `cursor` is the slot's committed position; empty: the beginning.
    """

    slot: Number
    cursor: Annotated[dict[ShortName, Number], msgspec.Meta(max_length=MOST_PLACES)] = {}


class Registered(Message, frozen=True):
    """Answer to `Register`: the member's slot and the state of the job."""

    slot: Number
    num_slots: Number
    committed_round: Number
    """Rounds committed so far, which is the number of the next one."""
    stopping: bool
    resume_round: Number = -1
    """Round of the checkpoint to start from; -1: start fresh."""
    recover: bool = False
    """The run has begun: the member MUST recover the committed state before its first step."""
    lease: Lease | None = None
    """Data until the first verdict; None: the member's own slot from its beginning."""
    key: bytes = b""
    """Secret with which the job's members authenticate each other on direct connections."""
    encrypted: bool = True
    """Whether direct connections are encrypted, by `encryption` in `[job]`."""
    first_epoch: Number = 0
    """Epoch of the run's first plan, for which members connect before it is made; 0: unknown."""


class Recover(Message, frozen=True):
    """Ask for donors of the committed state."""

    failed: list[str] = []
    """Donors that failed during this recovery."""
    ready: bool = True
    """Whether the member can load the state at once, so that rounds may wait for it; False while it
    is still starting and only prefetches."""
    needs_s: Finite = 0.0
    """Seconds of its last fetch, if a newer state was committed before the fetch ended; 0: none
    was."""


class Source(Message, frozen=True):
    """A live member that holds the committed state."""

    member: str
    state: list[str] = []
    """host:port at which it serves the state; empty: only through the hub."""


class Sources(Message, frozen=True):
    """Answer to `Recover`. Rounds wait for the asking member, for a bounded time."""

    round: Number
    """Rounds committed: the version of the state, and the next round to join."""
    peers: list[Source] = []
    """In slot order. Empty: recover from the checkpoint."""
    checkpoint_round: Number = -1
    """Newest complete checkpoint; without peers the run is reset to it. -1: start fresh."""
    pace: Finite = 1.0
    """Share of a period's steps to train before the next round, to join it with the others."""
    lease: Lease | None = None


class Standing(Message, frozen=True):
    """Notice of a member: it has recovered the committed state."""

    round: Number
    base: str
    sources: list[str] = []
    """The donors, or `checkpoint`."""
    seconds: Finite = 0.0
    nbytes: Number = 0


class Leaving(Message, frozen=True):
    """Notice of a member that leaves for good, e.g. on preemption; rounds stop waiting for it."""

    reason: str = ""


class Stopping(Message, frozen=True):
    """Notice to a member of a job without rounds that the job ends: finish, save and leave."""

    job: str


class Drain(Message, frozen=True):
    """Notice of a node that it leaves soon and takes no new work; `draining=False` revokes it."""

    draining: bool = True
    reason: str = ""
    leaving: bool = False
    """Its agent ends now: the end of its connection is no loss."""
