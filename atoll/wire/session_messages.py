"""Messages of a session: opening, heartbeats, credit, and failures."""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.wire.message import MOST_ITEMS, Finite, Message, Name, Number, WallTime

KINDS = ("trainer", "rl", "script", "command", "container")


class Hello(Message, frozen=True):
    """First message of every connection; `info` is sent by nodes only."""

    protocol: Number
    version: str
    session: str
    """Own address: a node id, `job/w3` for a member, `job/reducer`."""
    token: str
    incarnation: Name
    """Random per process; a new one under the same session replaces the old process."""
    info: NodeInfo | None = None


class Welcome(Message, frozen=True):
    """The hub's answer to `Hello`."""

    version: str
    window_bytes: Number
    heartbeat_s: Finite
    resumed: bool
    """Whether the hub knew this incarnation (a reconnect)."""
    limits: dict[str, Number] = {}
    """Limits that a reducer enforces, by name of the quota."""


class Failure(Message, frozen=True):
    """Answer to a failed request: `AtollError.to_dict()`."""

    error: dict[str, str]


class Done(Message, frozen=True):
    """Empty answer."""


class Beat(Message, frozen=True):
    """Heartbeat with figures for the dashboard (cpu, memory, sent_bytes, ...)."""

    stats: Annotated[dict[str, Finite], msgspec.Meta(max_length=MOST_ITEMS)] = {}
    time: WallTime = 0.0
    """The sender's wall clock, seconds since 1970; 0: not given."""


class Credit(Message, frozen=True):
    """Notice of the hub to a sender: `nbytes` of relay frames to `to` have left the hub."""

    to: str
    nbytes: Number


class Undeliverable(Message, frozen=True):
    """Notice of the hub to a sender: no session has address `to`; the frame was dropped."""

    to: str


class Offer(Message, frozen=True):
    """The resources of a machine that its owner offers to the cluster. Zero: unlimited."""

    cores: Finite = 0.0
    memory_bytes: Number = 0
    disk_bytes: Number = 0
    upload_bps: Finite = 0.0
    download_bps: Finite = 0.0
    kinds: list[str] = msgspec.field(default_factory=lambda: list(KINDS))
    """Kinds of job that it runs, see `KINDS`; `signed`: containers and scripts with an image or
    code signed by a key of the owner."""
    mounts: list[str] = []
    """Host folders that containers may mount."""
    labels: list[str] = []
    text: list[str] = []
    """The policy in words, one line each."""
    device: str = "auto"
    """The device of jobs: `auto` (what is there), `cpu` (the owner keeps the accelerator), or e.g.
    `cuda:1`."""
    paused: str = ""
    """Why it takes no work now, e.g. `on battery` or `quiet hours until 07:00`."""


class Offering(Message, frozen=True):
    """Notice of a node: its owner's policy, or the resulting offer, has changed."""

    offer: Offer


class NodeInfo(Message, frozen=True):
    """Hardware and software of a machine."""

    hostname: str
    system: str
    python: str
    atoll: str
    torch: str = ""
    cores: Number = 0
    memory_bytes: Number = 0
    disk_free_bytes: Number = 0
    gpu: str = ""
    slots: Number = 1
    """Workers that it takes at once."""
    matmul_gflops: Finite = 0.0
    gpu_memory_bytes: Number = 0
    """Of its first accelerator."""
    gpus: Number = 0
    launchers: list[str] = msgspec.field(default_factory=lambda: ["process"])
    """Available launchers: `process`, `container`."""
    offer: Offer | None = None
    """None: all resources, at any time."""
    computes_on: str = ""
    """The device of jobs for people, e.g. `NVIDIA H100 (80 GB)`; empty: not tried."""
    idle: str = ""
    """Why an accelerator of this machine is not used, with the remedy."""
