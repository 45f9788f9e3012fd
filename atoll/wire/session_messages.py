"""Messages of a session: its opening, its heartbeats, credit, and failures."""

from __future__ import annotations

import msgspec

from atoll.wire.message import Message

KINDS = ("trainer", "rl", "script", "command", "container")
"""Kinds of job."""


class Hello(Message, frozen=True):
    """First message of every connection. `info` describes a node (see `NodeInfo`)."""

    protocol: int
    version: str
    session: str
    """Own address: a node id, `job/w3` for a member, `job/reducer`."""
    token: str
    incarnation: str
    """Random per process: a new one under the same session replaces the old process."""
    info: NodeInfo | None = None


class Welcome(Message, frozen=True):
    """The hub's answer to `Hello`."""

    version: str
    window_bytes: int
    heartbeat_s: float
    resumed: bool
    """The hub knew this incarnation already (a reconnect)."""


class Failure(Message, frozen=True):
    """The answer to a request that could not be done: `AtollError.to_dict()`."""

    error: dict[str, str]


class Done(Message, frozen=True):
    """The answer to a request that has nothing to tell."""


class Beat(Message, frozen=True):
    """Notice: I live. `stats` are figures for the dashboard (cpu, memory, sent_bytes, ...)."""

    stats: dict[str, float] = {}
    time: float = 0.0
    """The sender's wall clock, seconds since 1970; 0: not told."""


class Credit(Message, frozen=True):
    """Notice of the hub to a sender: `nbytes` of relay frames to `to` have left the hub."""

    to: str
    nbytes: int


class Undeliverable(Message, frozen=True):
    """Notice of the hub to a sender: nobody is at address `to`; the frame was dropped."""

    to: str


class Offer(Message, frozen=True):
    """What the owner of a machine lets the cluster have of it. A node tells it when it changes.

    Zero means no limit.
    """

    cores: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    upload_bps: float = 0.0
    download_bps: float = 0.0
    kinds: list[str] = msgspec.field(default_factory=lambda: list(KINDS))
    """Kinds of job that it runs: the built-in `trainer`, a Python `script`, a `command`, a
    `container`; `signed`: containers whose image its owner's keys have signed."""
    mounts: list[str] = []
    """Folders of this machine that containers may mount."""
    labels: list[str] = []
    text: list[str] = []
    """The policy in words, a line each, for people."""
    paused: str = ""
    """Why it takes no work at this moment, e.g. `on battery` or `quiet hours until 07:00`."""


class Offering(Message, frozen=True):
    """A node tells that its owner's policy, or what follows from it just now, has changed."""

    offer: Offer


class NodeInfo(Message, frozen=True):
    """What a machine is and offers."""

    hostname: str
    system: str
    python: str
    atoll: str
    torch: str = ""
    cores: int = 0
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    gpu: str = ""
    slots: int = 1
    """How many workers it takes at once."""
    matmul_gflops: float = 0.0
    gpu_memory_bytes: int = 0
    """Memory of its first accelerator."""
    gpus: int = 0
    launchers: list[str] = msgspec.field(default_factory=lambda: ["process"])
    """How it can start processes: `process`, `container`."""
    offer: Offer | None = None
    """What its owner lets the cluster have; None: everything, at any time."""
