"""Messages about nodes and the processes of jobs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from atoll.wire.message import MOST_ITEMS, Finite, Message, Name, Number, WallTime
from atoll.wire.states import ProcessPhase


class Launch(Message, frozen=True):
    """Command to a node (an item of queue `node/ID`): start one process of a job."""

    job: str
    member: str
    """`w0`, `w1`, ... or `reducer`."""
    slot: Number
    token: str
    spec: str
    """The job's TOML text, resolved."""
    files: dict[str, str] = {}
    """File name -> text, e.g. the user's own script."""
    attempt: Number = 1


class Stop(Message, frozen=True):
    """Command to a node: end one process of a job, by force after `grace_s`."""

    job: str
    member: str
    grace_s: Finite = 10.0
    attempt: Number = 0
    """0: the running one."""


class RendezvousAddress(msgspec.Struct, frozen=True):
    """Address and secret with which follower hosts join the first host of an island.

    The hub keeps it in memory only and sends it only to processes of the same job.
    """

    dial: str
    """host:port of the supervisor on the island's first host."""
    secret: str


class ProcessState(Message, frozen=True):
    """Notice of a node: a process of a job changed its state."""

    job: Name
    member: Name
    state: ProcessPhase
    exit_code: Number | None = None
    error: dict[str, str] | None = None
    tail: list[str] = []
    """The last lines of its output, if it failed."""
    attempt: Number = 0
    """0: unknown."""
    collecting: bool = False
    """It has exited and its artifacts are being uploaded; reported again after the upload."""


class LogLines(Message, frozen=True):
    """Lines that a process printed; `seq` numbers the first one, from 1."""

    job: Name
    member: Name
    seq: Number
    lines: Annotated[list[str], msgspec.Meta(max_length=MOST_ITEMS)]


class Acked(Message, frozen=True):
    """Answer: everything up to and including `seq` is durable."""

    seq: Number


class Point(Message, frozen=True):
    """One measurement of a member; `values` e.g. loss, tokens, step_s, compute_s."""

    time: WallTime
    step: Number
    round: Number
    values: dict[str, float]


class Metrics(Message, frozen=True):
    """Measurements of a member; `seq` numbers the first point, from 1 per incarnation."""

    incarnation: Name
    seq: Number
    points: Annotated[list[Point], msgspec.Meta(max_length=MOST_ITEMS)]


WAITS_FOR_ROOM, FOUND_ROOM = "waits-for-room", "found-room"
"""Kinds of events: a member waits until the hub's disk has room for what it trained; it has."""


class Event(Message, frozen=True):
    """An event of a member or a node, for people."""

    kind: str
    text: str
    fields: dict[str, str] = {}


class Finished(Message, frozen=True):
    """Notice of a member that leaves its finished job; `result` is its part of the summary."""

    ok: bool
    result: dict[str, Any] = {}
    error: dict[str, str] | None = None
