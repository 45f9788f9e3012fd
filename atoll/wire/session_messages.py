"""Messages of a session: its opening, its heartbeats, credit, and failures."""

from __future__ import annotations

from atoll.wire.message import Message


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


class Credit(Message, frozen=True):
    """Notice of the hub to a sender: `nbytes` of relay frames to `to` have left the hub."""

    to: str
    nbytes: int


class Undeliverable(Message, frozen=True):
    """Notice of the hub to a sender: nobody is at address `to`; the frame was dropped."""

    to: str


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
