"""The state of a member of parameter servers: the last sync point, and its own progress since."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.strategies.base import Committed, Traffic
from atoll.strategies.codec_selection import codec_state, load_codec_state
from atoll.strategies.outer.base import OuterDefaults, as_carrier
from atoll.strategies.outer.periodic import WeightRule, start_volume
from atoll.strategies.parameter_server.client import ParameterServerClient, Shards
from atoll.strategies.parameter_server.sync_points import Shard, SyncPoints, digest_of, marks
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.traffic import all_to_all_volume, total, volume
from atoll.strategies.vectors.flat import Flat, digest
from atoll.task import Task
from atoll.wire.parameter_server_messages import Setup

REPLIES = ("fp32", "bf16", "fp16")
"""Codecs in which servers can send the vector back."""

_RULE = "shared.rule."


class ParameterServerState(OuterDefaults, ABC):
    """Options, state and formulas of :class:`ParameterServerOuter`."""

    can_grow = False  # servers hold a vector of fixed length
    _round_client: RoundClient
    _group: Group
    _codec: Codec
    _flat: Flat
    _shards: Shards
    _server_client: ParameterServerClient
    _start: Tensor
    """The vector this member pulled last."""
    _anchor: Tensor
    """The vector all members agreed on last."""
    _scratch: Tensor
    _rules: list[tuple[dict[str, Tensor], dict[str, float]]]
    """Per server at the sync point: vectors and numbers of its update rule."""
    _versions: list[int]
    """Per server: version of its part in `_start`."""
    _anchor_versions: list[int]
    """Per server: version of its part in `_anchor`."""

    def __init__(
        self,
        *,
        every: int,
        servers: int,
        anchor_every: int,
        reply: str,
        weight: str,
        clock: Clock | None = None,
    ) -> None:
        """Check the options that all these methods have.

        Raises:
            ConfigError: an option is out of range.
        """
        least = {"every": (every, 1), "servers": (servers, 1), "anchor_every": (anchor_every, 0)}
        for name, (given, smallest) in least.items():
            if given < smallest:
                raise ConfigError(
                    f"{name} is too small", given=given, expected=f"{smallest} or more"
                )
        if reply not in REPLIES:
            raise ConfigError(
                "unknown codec of answers", given=f"reply = {reply!r}",
                expected=f"one of {', '.join(REPLIES)}",
            )  # fmt: skip
        self._every, self._num_servers, self._reply = every, servers, make_codec(reply)
        self._anchor_every = anchor_every or 10 * every
        self._weigher = WeightRule(weight)
        self._clock: Clock = clock if clock is not None else RealClock()
        self._base = "start"
        self._epoch, self._anchor_step = -1, 0
        self._members: tuple[str, ...] = ()
        """Members of the last sync point; empty if this member joined after it."""
        self._alone = self._final = self._hurry = False
        self._done, self._planned, self._since = 0, every, 0
        self._marked = (0, 0)
        """Bytes of the group at the last sync point."""
        self._resumed = False
        """Whether the last loaded state was this member's own, not a donor's."""
        self._owed: Tensor | None = None
        """Part of an update that was pushed to servers which had lost their state."""

    # ------------------------------------------------------------ what a subclass decides

    @abstractmethod
    def server_setup(self, parameters: int, members: int) -> Setup:
        """Return the configuration of a server with `parameters` values and `members` clients."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether servers only add up the moves of a single member."""

    # -------------------------------------------------------------------------- queries

    @property
    def _next_anchor(self) -> int:
        return self._anchor_step + self._anchor_every

    def _setup_of(self, number: int) -> Setup:
        return self.server_setup(self._shards.parameters[number], max(1, len(self._members)))

    def _anchor_shard(self, number: int) -> Shard:
        """Return a server's part of the last sync point."""
        vectors, scalars = self._rules[number]
        theta = self._shards.take(self._anchor, number)
        return Shard(theta, vectors, scalars, self._anchor_versions[number])

    def _adopt(self, found: SyncPoints) -> float:
        """Load an agreed state; return how far the vector moved."""
        before = self._anchor.clone()
        for number, shard in enumerate(found.shards):
            self._shards.put(self._anchor, number, shard.theta)
            self._rules[number] = (shard.vectors, shard.scalars)
        self._versions = [shard.version for shard in found.shards]
        self._anchor_versions = list(self._versions)
        self._start.copy_(self._anchor)
        self._flat.write(self._start)
        return float((before - self._anchor).norm())

    def _digest(self) -> str:
        """Return the digest of the sync point's state, right after it was agreed on."""
        shards = [self._anchor_shard(number) for number in range(self._num_servers)]
        return digest_of(shards, anchor=self._epoch)

    def digest(self, task: Task) -> str:
        """Return the digest of the current parameters and buffers."""
        return digest(self._flat.read(self._scratch))

    def committed(self, task: Task) -> Committed:
        """Return the state of the last sync point; see :meth:`Outer.committed`."""
        return Committed(self._anchor_step, self._base, self._flat.values(self._anchor))

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Load the last sync point's state, which all members share, into the model."""
        return nullcontext() if self._alone else as_carrier(self._flat, self._anchor)

    # -------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the last sync point's state, and what this member has pulled and done since."""
        shared: dict[str, Tensor] = {"shared.theta": self._anchor}
        for number, (vectors, scalars) in enumerate(self._rules):
            shared |= {f"{_RULE}{number}.{name}": value for name, value in vectors.items()}
            numbers = [scalars[name] for name in sorted(scalars)]
            shared[f"{_RULE}{number}.numbers"] = torch.tensor(numbers, dtype=torch.float64)
        shared["shared.anchor"] = torch.tensor(
            [self._epoch, self._anchor_step, *self._anchor_versions]
        )
        names = "\0".join(self._members).encode()
        shared["shared.members"] = torch.tensor(list(names), dtype=torch.uint8)
        own = codec_state(self._codec)
        own["own.pulled"] = self._start
        own["own.counters"] = torch.tensor(
            [
                *self._weigher.state().tolist(), self._done, self._planned, self._since,
                self._server_client.seq, self._alone, self._server_client.attached, *self._versions,
            ]
        )  # fmt: skip
        if self._owed is not None:
            own["own.owed"] = self._owed
        return shared | own

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        theta = state["shared.theta"]
        servers = sum(k.startswith(_RULE) and k.endswith(".numbers") for k in state)
        if theta.shape != self._anchor.shape or servers != self._num_servers:
            raise ConfigError(
                "this state belongs to another model, or to another number of servers",
                given=f"{theta.numel()} elements on {servers} servers",
                expected=f"{self._anchor.numel()} elements on {self._num_servers} servers",
            )
        self._check_rules(state)
        self._anchor.copy_(theta)
        self._start.copy_(state.get("own.pulled", theta))
        for number, (vectors, scalars) in enumerate(self._rules):
            for name, vector in vectors.items():
                vector.copy_(state[f"{_RULE}{number}.{name}"])
            numbers = state[f"{_RULE}{number}.numbers"].tolist()
            scalars.update(zip(sorted(scalars), numbers, strict=True))
        epoch, step, *versions = (int(value) for value in state["shared.anchor"].tolist())
        self._epoch, self._anchor_step, self._versions = epoch, step, versions
        self._anchor_versions = list(versions)
        self._base = self._digest()
        load_codec_state(self._codec, state)
        self._owed = state["own.owed"].clone() if "own.owed" in state else None
        self._resumed = "own.counters" in state
        if self._resumed:  # a donor's counters do not apply to this member
            names = bytes(state["shared.members"].tolist()).decode()
            self._members = tuple(filter(None, names.split("\0")))
            self._load_counters([int(value) for value in state["own.counters"].tolist()])

    def _check_rules(self, state: Mapping[str, Tensor]) -> None:
        """Raise ConfigError unless a state has the vectors and numbers of the servers' rules."""
        for number, (vectors, scalars) in enumerate(self._rules):
            start = f"{_RULE}{number}."
            own = {start + name: vector.shape for name, vector in vectors.items()}
            own[f"{start}numbers"] = torch.Size([len(scalars)])
            given = {name: value.shape for name, value in state.items() if name.startswith(start)}
            if given != own:
                raise ConfigError(
                    "this state belongs to another update rule of the servers",
                    given=", ".join(f"{name} {tuple(given[name])}" for name in sorted(given)),
                    expected=", ".join(f"{name} {tuple(own[name])}" for name in sorted(own)),
                    remedy="keep the servers' optimizer, or start from the parameters alone",
                )

    def _load_counters(self, numbers: list[int]) -> None:
        self._weigher.load(torch.tensor(numbers[:2]))
        self._done, self._planned, self._since, self._server_client.seq = numbers[2:6]
        self._alone, self._server_client.attached = bool(numbers[6]), bool(numbers[7])
        self._versions = numbers[8:]

    # ------------------------------------------------------------------------ traffic

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic, assuming equally fast members; see :meth:`Outer.traffic`.

        The first member fetches the servers' state for every sync point, and loads them after it.
        """
        shards = self._shards_like(elements)
        exact = make_codec("fp32")
        rule = len(self._rules[0][0])
        held = [n + rule * p for n, p in zip(shards.sizes, shards.parameters, strict=True)]
        packed = sum(held) + self._num_servers * len(self._rules[0][1])
        anchor = total_round(
            volume(exact, marks(peers, self._num_servers), peers, rank=rank),
            all_to_all_volume(
                [(exact.nbytes(packed), peers - 1)] if rank == 0 and peers > 1 else [],
                [exact.nbytes(packed)] if rank else [],
            ),
        )
        parts = [start_volume(peers, rank=rank)]
        if peers < 2 and self.is_plain:
            return total([*parts, *[anchor] * (steps // self._anchor_every + 1)])
        push = _request_traffic(
            sum(self._codec.nbytes(n) for n in shards.sizes),
            sum(self._reply.nbytes(n) for n in shards.sizes),
        )
        held_bytes = sum(exact.nbytes(n) for n in held) if rank == 0 else 0
        parts.append(_request_traffic(held_bytes, 0))
        step = anchored = 0
        while step < steps:
            step = min(step + self._every, steps)
            parts.append(push)
            if step >= anchored + self._anchor_every:
                anchored = step
                parts += [_request_traffic(0, held_bytes), anchor, _request_traffic(held_bytes, 0)]
        return total([*parts, _request_traffic(0, held_bytes), anchor])

    def _shards_like(self, elements: int) -> Shards:
        """Return how a vector of so many elements would be cut, with the same number of buffers."""
        buffers = self._flat.num_elements - self._shards.num_parameters
        return Shards(max(0, elements - buffers), elements, servers=self._num_servers)


def total_round(first: Traffic, second: Traffic) -> Traffic:
    """Return the traffic of two exchanges, counted as one round."""
    both = total([first, second])
    return Traffic(
        1, both.relay_sent_bytes, both.relay_received_bytes,
        both.direct_sent_bytes, both.direct_received_bytes,
    )  # fmt: skip


def _request_traffic(sent: int, received: int) -> Traffic:
    """Return the traffic of requests to servers, which always use the relay."""
    return Traffic(0, sent, received, sent, received)
