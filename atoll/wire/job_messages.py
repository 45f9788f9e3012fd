"""Messages about nodes and the processes of jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.wire.message import Message
from atoll.wire.states import ProcessPhase


class Launch(Message, frozen=True):
    """Command to a node (an item of queue `node/ID`): start one process of a job."""

    job: str
    member: str
    """`w0`, `w1`, ... or `reducer`."""
    slot: int
    token: str
    spec: str
    """The job's TOML text, resolved."""
    files: dict[str, str] = {}
    """File name -> text: the user's own script travels here."""
    attempt: int = 1


class Stop(Message, frozen=True):
    """Command to a node: end one process of a job; kill it after `grace_s`."""

    job: str
    member: str
    grace_s: float = 10.0
    attempt: int = 0
    """Which attempt is meant; 0: whichever runs."""


class RendezvousAddress(msgspec.Struct, frozen=True):
    """Where follower hosts find the first machine of an island, and their common secret.

    Kept by the hub in memory only, and told to processes of the same job only.
    """

    dial: str
    """host:port of the supervisor on the island's first machine."""
    secret: str


class ProcessState(Message, frozen=True):
    """A node tells: a process of a job changed its state."""

    job: str
    member: str
    state: ProcessPhase
    exit_code: int | None = None
    error: dict[str, str] | None = None
    tail: list[str] = []
    """Last lines it printed, when it failed."""
    attempt: int = 0
    """Which attempt it was; 0: unknown."""
    collecting: bool = False
    """It has exited, and its artifacts are still sent; reported again when they are there."""


class LogLines(Message, frozen=True):
    """A node ships lines that a process printed; `seq` numbers the first line from 1."""

    job: str
    member: str
    seq: int
    lines: list[str]


class Acked(Message, frozen=True):
    """Answer: everything up to and including `seq` is durable."""

    seq: int


class Point(Message, frozen=True):
    """One measurement of a member. `values` e.g. loss, tokens, step_s, compute_s."""

    time: float
    step: int
    round: int
    values: dict[str, float]


class Metrics(Message, frozen=True):
    """A member ships measurements; `seq` numbers the first point from 1 (per incarnation)."""

    incarnation: str
    seq: int
    points: list[Point]


class Event(Message, frozen=True):
    """A member or a node reports something that happened, for people."""

    kind: str
    text: str
    fields: dict[str, str] = {}


class Finished(Message, frozen=True):
    """A member is done with its job and leaves; `result` is its part of the summary."""

    ok: bool
    result: dict[str, Any] = {}
    error: dict[str, str] | None = None
