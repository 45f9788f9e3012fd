"""Exact copies of whole tensors between rank 0 and the parts of all ranks; and heap trimming.

glibc keeps freed blocks of up to 32 MB, and cannot return those between blocks in use. The tensors
of a model have a few MB each: in time, unused blocks would take as much memory as the model.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

BUCKET_ELEMENTS = 1 << 20
"""Small tensors travel together up to this many elements."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Shape and type of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Bucket:
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks with a part of these tensors, and rank 0."""
    dtype: torch.dtype


class Subgroups:
    """Process groups, created when first needed. Collective."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Any] = {}

    def of(self, ranks: tuple[int, ...]) -> Any:
        """Return the group of some ranks; every rank of the island MUST call this."""
        if len(ranks) == dist.get_world_size():
            return None
        if ranks not in self._known:
            self._known[ranks] = dist.new_group(list(ranks))
        return self._known[ranks]


class Transport:
    """Moves whole tensors between rank 0 and the parts on all ranks; every method is collective.

    A part is a plain tensor, which is the whole one, or a DTensor.
    """

    def __init__(
        self, parts: Mapping[str, Tensor], *, device: torch.device, subgroups: Subgroups
    ) -> None:
        """Exchange with all ranks which parts each one has; `device` is that of the transfers."""
        self._parts, self._device = parts, device
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        own = {name: Kind(tuple(part.shape), part.dtype) for name, part in parts.items()}
        by_rank: list[dict[str, Kind]] = [own] * ranks
        if ranks > 1:
            dist.all_gather_object(by_rank, own)
        self.kinds = {name: kind for found in by_rank for name, kind in found.items()}
        """Every tensor of which some rank has a part; equal on all ranks."""
        self._holders = {
            name: tuple(rank for rank, found in enumerate(by_rank) if name in found)
            for name in self.kinds
        }
        self._buckets = self._packed()
        self._groups = {b.ranks: subgroups.of(b.ranks) for b in self._buckets}

    def _packed(self) -> list[_Bucket]:
        """Return the buckets: consecutive tensors with the same ranks and type."""
        buckets: list[_Bucket] = []
        held: list[str] = []

        def close() -> None:
            if held:
                ranks = tuple(sorted({0, *self._holders[held[0]]}))
                buckets.append(_Bucket(tuple(held), ranks, self.kinds[held[0]].dtype))
                held.clear()

        elements = 0
        for name, kind in self.kinds.items():
            like = held and (
                self._holders[held[0]] == self._holders[name]
                and self.kinds[held[0]].dtype == kind.dtype
                and elements + kind.elements <= BUCKET_ELEMENTS
            )
            if not like:
                close()
                elements = 0
            held.append(name)
            elements += kind.elements
        close()
        return buckets

    @torch.no_grad()
    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole tensor by name on rank 0, and nothing on the others.

        One at a time is in memory; all ranks MUST iterate to the end. A yielded tensor may be the
        part itself.
        """
        for name in self.kinds:
            whole = self.whole(name)
            if whole is not None:
                yield name, whole

    @torch.no_grad()
    def whole(self, name: str) -> Tensor | None:
        """Return one whole tensor on rank 0, perhaps the part itself; None on the others."""
        part, sender = self._parts.get(name), self._holders[name][0]
        whole = None if part is None else whole_of(part, device=self._device)
        if sender and self._rank == sender and whole is not None:
            dist.send(whole.to(self._device).contiguous(), 0)
        elif sender and self._rank == 0:
            kind = self.kinds[name]
            whole = torch.empty(kind.shape, dtype=kind.dtype, device=self._device)
            dist.recv(whole, sender)
        return whole if self._rank == 0 else None

    @torch.no_grad()
    def deal(self, wholes: Mapping[str, Tensor] | None) -> None:
        """Copy rank 0's whole tensors into the parts of all ranks; others pass None."""
        for bucket in self._buckets:
            if self._rank not in bucket.ranks:
                continue
            kinds = [self.kinds[name] for name in bucket.names]
            flat = torch.empty(
                sum(kind.elements for kind in kinds), dtype=bucket.dtype, device=self._device
            )
            pieces = _views(flat, kinds)
            if wholes is not None:
                for name, piece in zip(bucket.names, pieces, strict=True):
                    piece.copy_(wholes[name])
            if len(bucket.ranks) > 1:
                dist.broadcast(flat, src=0, group=self._groups[bucket.ranks])
            for name, piece in zip(bucket.names, pieces, strict=True):
                part = self._parts.get(name)
                if part is not None:
                    local_of(part).copy_(local_part(piece, like=part))


def _views(flat: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    pieces = torch.split(flat, [kind.elements for kind in kinds])
    return [piece.view(kind.shape) for piece, kind in zip(pieces, kinds, strict=True)]


def whole_of(part: Tensor, *, device: torch.device) -> Tensor | None:
    """Return a part's whole tensor on the first rank of its mesh; collective there.

    `device` is that of the mesh, because a part may be in main memory. Other ranks may get None.
    """
    if not isinstance(part, DTensor):
        return part.detach()
    if part.device_mesh.ndim == 1 and part.placements == (Shard(0),):
        return _joined(part, device)
    placed: Any = part.detach().to(device)
    whole: Tensor = placed.full_tensor()
    return whole


def _joined(part: DTensor, device: torch.device) -> Tensor | None:
    """Do as `whole_of` for sharded rows, received directly into place."""
    mesh, local = part.device_mesh, local_of(part).to(device).contiguous()
    group = mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    if mesh.get_local_rank():
        if local.numel():
            dist.send(local, ranks[0], group=group)
        return None
    whole = torch.empty(part.shape, dtype=part.dtype, device=device)
    whole[: len(local)] = local
    rows, share = len(whole), -(-len(whole) // len(ranks))
    for number, rank in enumerate(ranks[1:], start=1):
        piece = whole[min(rows, number * share) : min(rows, (number + 1) * share)]
        if piece.numel():
            dist.recv(piece, rank, group=group)
    return whole


def local_of(part: Tensor) -> Tensor:
    """Return this rank's elements of a part, sharing its memory."""
    return part._local_tensor.detach() if isinstance(part, DTensor) else part.detach()


def local_part(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is whole on every rank, without communication."""
    if not isinstance(like, DTensor):
        return whole
    everywhere = [Replicate()] * like.device_mesh.ndim
    spread = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def as_part(local: Tensor, *, like: Tensor) -> Tensor:
    """Return this rank's elements as a part with the layout of another, sharing their memory."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip


LARGE_BYTES = 4 << 20
"""Blocks from this size on are returned at once. That costs a quarter of a millisecond per MB when
the next one is touched; smaller ones are faster to keep."""

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def limit_heap() -> None:
    """Return large blocks of this process to the system as soon as they are freed."""
    system = _glibc()
    if system is not None:
        system.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def trim_heap() -> None:
    """Return freed memory to the system; slow, so call it after much was freed."""
    system = _glibc()
    if system is not None:
        system.malloc_trim(0)


def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    system = ctypes.CDLL(None)
    known = hasattr(system, "malloc_trim") and hasattr(system, "mallopt")  # musl has none
    return system if known else None
