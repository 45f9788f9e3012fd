"""Client of a job's parameter servers; every wait has a deadline.

A vector is cut into blocks that are assigned to servers by consistent hashing. Each server has many
points on a ring of hashes; a block belongs to the server whose point follows the block's hash.
Changing the number of servers moves only the blocks that must move.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec, Packet
from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, PeerLost, from_dict
from atoll.group.base import Group, Work
from atoll.group.in_process.servers import ServerRequest, rule_state
from atoll.strategies.parameter_server.sync_points import Shard
from atoll.wire.parameter_server_messages import Answer, Ask, Attach, Fetch, Idle, Load, Push, Setup

POINTS = 128
"""Points of each server on the ring."""
BLOCKS = 256
"""Blocks per server that a vector is cut into, unless they would be smaller than `LEAST`."""
LEAST = 16


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def assign(blocks: int, servers: int) -> list[int]:
    """Return the server of every block."""
    ring = sorted((_hash(f"server {s} {k}"), s) for s in range(servers) for k in range(POINTS))
    keys = [key for key, _ in ring]
    return [ring[bisect.bisect(keys, _hash(f"block {b}")) % len(ring)][1] for b in range(blocks)]


class Shards:
    """The parts of one flat vector by server; pure, and equal on every member."""

    def __init__(self, parameters: int, elements: int, *, servers: int) -> None:
        """Cut a vector.

        Args:
            parameters: Leading elements, which are spread over all servers.
            elements: Length of the vector; those behind the parameters (buffers) go to the first
                server.
            servers: How many, >= 1.
        """
        self.elements, self.num_parameters = elements, parameters
        size = max(LEAST, -(-parameters // (BLOCKS * servers))) if servers > 1 else parameters
        starts = list(range(0, parameters, size)) if size else []
        owners = assign(len(starts), servers) if servers > 1 else [0] * len(starts)
        self._parts: list[list[slice]] = [[] for _ in range(servers)]
        for start, owner in zip(starts, owners, strict=True):
            self._parts[owner].append(slice(start, min(parameters, start + size)))
        self.parameters = [sum(p.stop - p.start for p in parts) for parts in self._parts]
        """Elements of each part that are parameters."""
        self._tail = slice(parameters, elements)
        self.sizes = list(self.parameters)
        """Elements of each part."""
        self.sizes[0] += elements - parameters

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, vector: Tensor, number: int) -> Tensor:
        """Return a server's part of a vector: of all elements, or of the parameters only."""
        parts = self._slices(number, whole=vector.numel() == self.elements)
        if len(parts) == 1:
            return vector[parts[0]]
        return torch.cat([vector[part] for part in parts]) if parts else vector[:0]

    def put(self, vector: Tensor, number: int, values: Tensor) -> None:
        """Write a server's part into a vector."""
        at = 0
        for part in self._slices(number, whole=vector.numel() == self.elements):
            size = part.stop - part.start
            vector[part] = values[at : at + size]
            at += size

    def _slices(self, number: int, *, whole: bool) -> Sequence[slice]:
        parts = self._parts[number]
        if whole and number == 0 and self._tail.stop > self._tail.start:
            if parts and len(parts) == 1 and parts[0] == slice(0, self._tail.start):
                return [slice(0, self._tail.stop)]
            return [*parts, self._tail]
        return parts


T = TypeVar("T")

log = logging.getLogger(__name__)

WAIT_S = 180.0
"""How long a member waits for an unreachable server before it fails."""
EAGER_S = 5.0
"""How long it waits right after a sync point, when it could train instead."""
PAUSE_S = 0.5

__all__ = ["ParameterServerClient", "PulledState", "rule_state"]

Loading = Callable[[int], tuple[Shard, Setup, float]]
"""Returns what a server is loaded with: its part of the vector, its setup, the progress."""


@dataclass(slots=True)
class PulledState:
    """The servers' answers to one push or attach."""

    versions: list[int]
    first: Answer = field(default_factory=lambda: Answer("theta"))
    """Answer of the first server, whose clocks and pace count."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """Server -> its current part of the vector."""
    lost: list[int] = field(default_factory=list)
    """Servers that do not have the sync point's state."""
    refused: dict[str, str] | None = None
    """Why a server could not apply the push."""
    accepted: bool = True
    """Whether any server applied it."""


class ParameterServerClient:
    """Requests to all servers on behalf of one member."""

    def __init__(self, group: Group, shards: Shards, clock: Clock) -> None:
        """Connect to one server per part of `shards`."""
        self._group, self._shards, self._clock = group, shards, clock
        self.attached = False
        self.progress = 0.0
        """As the servers reported last."""
        self.seq = 0
        self._waited_s = 0.0
        self._busy_since = clock.monotonic()

    def forget(self) -> None:
        """Attach anew at the next request: a sync point was committed or the state was replaced."""
        self.attached, self.progress = False, 0.0

    def take_waited(self) -> float:
        """Return the seconds waited for servers since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    # ---------------------------------------------------------------------------- requests

    def attach(
        self, anchor: int, members: Sequence[str], loading: Loading, *, patient: bool
    ) -> PulledState | None:
        """Attach to all servers, and load those that ask for it.

        Args:
            anchor: Number of this member's sync point.
            members: Members of that sync point; empty if this member joined later and pulls
                instead.
            loading: Returns what a server is loaded with.
            patient: Wait for servers that are unreachable.

        Returns:
            The servers' state; None if one is unreachable or does not have the sync point's state.

        Raises:
            DeadlineExceeded: a server was unreachable for too long.
        """
        deadline = self._clock.monotonic() + (WAIT_S if patient else EAGER_S)
        ask, cancelled = Attach(anchor, members=list(members), want=not members), threading.Event()
        works = [  # at once: a server may hold back its answer until others have come to all
            Work.start(
                partial(self._entered, ask, n, loading, deadline, cancelled), name=f"attach-{n}"
            )
            for n in range(len(self._shards))
        ]
        try:
            return self._attached(works, patient=patient)
        finally:
            cancelled.set()  # the others would ask beside the next requests

    def _attached(
        self, works: Sequence[Work[ServerRequest | None]], *, patient: bool
    ) -> PulledState | None:
        """Return the servers' answers to an attach; see :meth:`attach`."""
        pulled = PulledState([0] * len(self._shards))
        for number, work in enumerate(works):
            request = self._wait(work)
            if request is None and patient:
                raise DeadlineExceeded(
                    "a parameter server is unreachable", given=f"server {number}, {WAIT_S:.0f} s",
                    remedy="see the job's events for why its reducer does not run",
                )  # fmt: skip
            if request is None or request.answer.kind != "theta":
                return None
            self._note(pulled, number, request)
        self.attached, self._busy_since = True, self._clock.monotonic()
        return pulled

    def _entered(
        self,
        ask: Attach,
        number: int,
        loading: Loading,
        deadline: float,
        cancelled: threading.Event,
    ) -> ServerRequest | None:
        """Return a server's answer to an attach.

        None if it is unreachable until the deadline, or if the attach is cancelled.
        """
        while not cancelled.is_set():
            try:
                request = self._group.ask_server(ask, server=number).wait()
                if request.answer.kind == "load":
                    if cancelled.is_set():  # the anchor may be replaced by now
                        return None
                    shard, setup, progress = loading(number)
                    load, packet = _load(ask, shard, setup, progress)
                    request = self._group.ask_server(load, packet, server=number).wait()
                if request.answer.kind == "refused":
                    raise from_dict(request.answer.error)
                return request
            except (PeerLost, DeadlineExceeded) as error:
                log.warning("parameter server %s: %s", number, error)
                if self._clock.monotonic() >= deadline:
                    return None
                cancelled.wait(PAUSE_S)
        return None

    def push(
        self,
        vector: Tensor,
        codec: Codec,
        *,
        anchor: int,
        versions: Sequence[int],
        steps: int,
        weight: float,
        rate: float,
    ) -> PulledState:
        """Push a vector to all servers at once and return their state afterwards."""
        self.seq += 1
        codec.set_round(self.seq)
        began = self._clock.monotonic()
        works: list[Work[ServerRequest]] = []
        for number in range(len(self._shards)):
            part = self._shards.take(vector, number).contiguous()
            packet = codec.encode(part, key=f"push-{number}")
            ask = Push(
                anchor, self.seq, versions[number], packet.codec, list(packet.sizes), steps=steps,
                busy_s=began - self._busy_since, weight=weight, rate=rate,
            )  # fmt: skip
            works.append(self._group.ask_server(ask, packet, server=number))
        pulled = PulledState(list(versions), accepted=False)
        for number, work in enumerate(works):
            try:
                self._note(pulled, number, self._wait(work))
            except (PeerLost, DeadlineExceeded) as error:
                log.warning("parameter server %s: %s", number, error)
                pulled.lost.append(number)
        if pulled.lost:
            self.attached = False
        self._busy_since = self._clock.monotonic()
        return pulled

    def idle(self, anchor: int, *, final: bool) -> None:
        """Tell the servers that no push follows before the next sync point; best effort."""
        if not self.attached:
            return
        ask = Idle(anchor, final=final)
        works = [self._group.ask_server(ask, server=n) for n in range(len(self._shards))]
        for number, work in enumerate(works):
            try:
                self._wait(work)
            except (PeerLost, DeadlineExceeded) as error:
                log.warning("parameter server %s: %s", number, error)

    def fetch(self, anchor: int, like: Shard, *, server: int) -> Shard | None:
        """Return a server's state, in the shape of `like`; None if it has none or is unreachable.

        May be called on another thread.
        """
        try:
            request = self._group.ask_server(Fetch(anchor), server=server).wait()
        except (PeerLost, DeadlineExceeded) as error:
            log.warning("parameter server %s: %s", server, error)
            return None
        answer, packet = request.answer, request.packet
        fits = answer.kind == "state" and packet is not None
        if not fits or packet is None or sorted(answer.vectors) != sorted(like.vectors):
            return None
        flat = make_codec("fp32").decode(packet)
        sizes = [like.theta.numel(), *(like.vectors[name].numel() for name in answer.vectors)]
        if sum(sizes) != flat.numel() or answer.scalars.keys() != like.scalars.keys():
            return None
        theta, *vectors = torch.split(flat, sizes)
        named = dict(zip(answer.vectors, vectors, strict=True))
        return Shard(theta, named, dict(answer.scalars), answer.version, fetched=True)

    # --------------------------------------------------------------------------- parts

    def _wait(self, work: Work[T]) -> T:
        began = self._clock.monotonic()
        try:
            return work.wait()
        finally:
            self._waited_s += self._clock.monotonic() - began

    def _note(self, pulled: PulledState, number: int, request: ServerRequest) -> None:
        """Add one server's answer."""
        answer = request.answer
        if answer.kind == "refused":
            pulled.refused = answer.error
        elif answer.kind != "theta":
            pulled.lost.append(number)
        else:
            pulled.versions[number] = answer.version
            pulled.accepted |= answer.accepted
            if number == 0:
                pulled.first = answer
                self.progress = answer.progress
            if request.packet is not None:
                pulled.values[number] = make_codec(request.packet.codec).decode(request.packet)


def _load(ask: Attach, shard: Shard, setup: Setup, progress: float) -> tuple[Ask, Packet]:
    """Return the request that loads a server."""
    names = sorted(shard.vectors)
    body = Shard(shard.theta, shard.vectors, {}, shard.version).pack()
    load = Load(
        ask.anchor, ask.members, setup, shard.theta.numel(), vectors=names,
        scalars=shard.scalars, version=shard.version, progress=progress,
    )  # fmt: skip
    return load, make_codec("fp32").encode(body)
