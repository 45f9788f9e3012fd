"""Sync points: committed rounds that make the servers' state the common state of all members.

All members pause. The first one fetches the servers' state; where a server has none, because it was
restarted, the member with the newest pulled vector provides it. Then every member copies the
provider's values exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.digest import Digest
from atoll.errors import GroupError, PeerLost
from atoll.group.base import Group, PeerMessage, Reduced, Resting
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)

DIGIT = 4096
"""Integers travel as digits of this base: small enough that a float mean restores them exactly."""
DIGITS = 3
FINE = 256
"""Progress is counted in 1/256 of a step."""
MARKS = DIGITS + 1
"""Numbers sent per server: whether it was asked, and the version's digits."""


@dataclass(slots=True)
class Shard:
    """One server's part of the state, as one member knows it."""

    theta: Tensor
    vectors: dict[str, Tensor]
    scalars: dict[str, float]
    version: int
    fetched: bool = False
    """Whether it was fetched from the server itself."""

    def pack(self) -> Tensor:
        """Return all its values as one float32 vector."""
        scalars = torch.tensor([self.scalars[k] for k in sorted(self.scalars)])
        return torch.cat([self.theta, *(self.vectors[k] for k in sorted(self.vectors)), scalars])

    def unpack(self, vector: Tensor, *, version: int) -> Shard:
        """Return a shard of this shape from a packed vector."""
        names, keys = sorted(self.vectors), sorted(self.scalars)
        sizes = [self.theta.numel(), *(self.vectors[k].numel() for k in names), len(keys)]
        theta, *vectors, scalars = torch.split(vector, sizes)
        return Shard(
            theta.clone(), {k: v.clone() for k, v in zip(names, vectors, strict=True)},
            dict(zip(keys, scalars.tolist(), strict=True)), version,
        )  # fmt: skip

    @property
    def packed(self) -> int:
        """Elements of `pack()`."""
        return (
            self.theta.numel() + sum(v.numel() for v in self.vectors.values()) + len(self.scalars)
        )


@dataclass(frozen=True, slots=True)
class View:
    """What one member contributes to a sync point."""

    shards: list[Shard]
    progress: float
    done: bool
    """Whether it has done all its steps."""


@dataclass(frozen=True, slots=True)
class SyncPoints:
    """The state all members agreed on."""

    shards: list[Shard]
    progress: float
    done: bool
    """Whether every member has done all its steps."""
    contributors: tuple[str, ...]
    digest: str
    weight: float
    """Number of members that took part."""


def marks(members: int, servers: int) -> int:
    """Return how many numbers are exchanged before the values."""
    return members * (2 + DIGITS + MARKS * servers)


def hold_sync_point(group: Group, plan: RoundPlan, view: View, *, resting: Resting) -> SyncPoints:
    """Return the state that the plan's members agree on; changes nothing.

    Raises:
        PeerLost: the member that was to provide values was lost.
    """
    codec = make_codec("fp32")
    members, rows = list(plan.members), len(plan.members)
    own = torch.zeros(rows, marks(1, len(view.shards)))
    own[members.index(group.me)] = _row(view)
    reduced = _reduced(group, own.flatten(), codec, 1.0, resting)
    table = (reduced.tensors[0] * len(reduced.contributors)).round().view(rows, -1)
    present = [row for row, name in enumerate(members) if name in reduced.contributors]
    givers = [_giver(table, present, number) for number in range(len(view.shards))]
    shards: dict[int, Shard] = {}
    digests = [reduced.digest]
    for giver in sorted(set(givers)):
        numbers = [n for n, chosen in enumerate(givers) if chosen == giver]
        packed = torch.cat([view.shards[n].pack() for n in numbers])
        given, digest = _given(group, members, packed, members[giver], resting)
        digests.append(digest)
        sizes = [view.shards[n].packed for n in numbers]
        for n, values in zip(numbers, torch.split(given, sizes), strict=True):
            version = _number(table[giver, 2 + DIGITS + MARKS * n + 1 :])
            shards[n] = view.shards[n].unpack(values, version=version)
    return SyncPoints(
        [shards[n] for n in range(len(view.shards))],
        progress=max(_number(table[row, 2:]) for row in present) / FINE,
        done=all(bool(table[row, 1]) for row in present),
        contributors=reduced.contributors,
        weight=float(len(reduced.contributors)),
        digest=Digest("".join(digests).encode()).hexdigest(),
    )


def _row(view: View) -> Tensor:
    """Return a member's report: presence, whether it is done, progress and versions."""
    row = [1.0, float(view.done), *_digits(round(view.progress * FINE))]
    for shard in view.shards:
        row += [float(shard.fetched), *_digits(shard.version)]
    return torch.tensor(row)


def _digits(number: int) -> list[float]:
    return [float(number // DIGIT**place % DIGIT) for place in range(DIGITS)]


def _number(row: Tensor) -> int:
    return sum(int(row[place]) * DIGIT**place for place in range(DIGITS))


def _giver(table: Tensor, present: Sequence[int], server: int) -> int:
    """Return the provider: the member that fetched, else the one with the newest version."""
    at = 2 + DIGITS + MARKS * server

    def standing(row: int) -> tuple[float, int, int]:
        return float(table[row, at]), _number(table[row, at + 1 :]), -row

    return max(present, key=standing)


def _reduced(
    group: Group, vector: Tensor, codec: Codec, weight: float, resting: Resting
) -> Reduced:
    work = group.reduce([vector], codec=codec, weight=weight, key="anchor")
    with resting():
        return work.wait()


def _given(
    group: Group, members: Sequence[str], vector: Tensor, giver: str, resting: Resting
) -> tuple[Tensor, str]:
    """Return the provider's values and the exchange's digest; only the provider sends values.

    Raises:
        PeerLost: the provider was lost; another attempt chooses another one.
    """
    codec, mine = make_codec("fp32"), giver == group.me
    others = tuple(member for member in members if member != giver)
    work = group.all_to_all([PeerMessage(others, codec.encode(vector))] if mine and others else [])
    with resting():
        got = work.wait()
    if mine:
        return vector, got.digest
    packets = got.packets.get(giver)
    if not packets:
        raise PeerLost("the member that provides the servers' state was lost", given=giver)
    values = codec.decode(packets[0])
    if values.numel() != vector.numel():
        raise GroupError(
            "the servers' state does not fit this member",
            given=f"{values.numel()} elements of {giver}", expected=f"{vector.numel()}",
            remedy="start every member with the same job file and the same model",
        )  # fmt: skip
    return values, got.digest


def digest_of(shards: Sequence[Shard], *, anchor: int) -> str:
    """Return the digest of a committed state."""
    digest = Digest(str(anchor).encode())
    for shard in shards:
        packed: Any = shard.pack().numpy()
        digest.update(packed)
        digest.update(str(shard.version).encode())
    return digest.hexdigest()


__all__ = ["Shard", "SyncPoints", "View", "digest_of", "hold_sync_point", "marks"]
