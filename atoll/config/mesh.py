"""The mesh of an island: ranks per kind of parallelism; without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from atoll.errors import ConfigError, unknown

AXES = ("replicate", "shard", "pipeline", "tensor")
"""Axes of a mesh, slowest links first: ranks that differ only in `tensor` are neighbours."""

AXIS_OF: Mapping[str, str] = MappingProxyType(
    {"ddp": "replicate", "fsdp": "shard", "tensor": "tensor", "pipeline": "pipeline"}
)
"""Inner strategy with one axis -> that axis."""

ONE_RANK = ("", "local", "swarm", "paths")
"""Inner strategies of one rank; empty: the preset's."""
HYBRID = "hybrid"


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks per axis; the last axis varies fastest in rank numbers."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Ranks per axis, in the order of `AXES`."""
        return self.replicate, self.shard, self.pipeline, self.tensor

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Ranks with different rows of a batch."""
        return self.replicate * self.shard

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by axis."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def __str__(self) -> str:
        """Return the axes that are not 1, e.g. `replicate=2 tensor=2`."""
        named = zip(AXES, self.sizes, strict=True)
        return " ".join(f"{axis}={size}" for axis, size in named if size > 1) or "1 rank"


def mesh_of(inner: str, *, ranks: int, mesh: Mapping[str, Any]) -> MeshShape:
    """Return the mesh of a job file; `ranks` 0: given by `mesh`.

    Raises ConfigError if an axis is invalid or the numbers contradict each other, with the nearest
    valid mesh.
    """
    sizes = _checked(mesh)
    if inner in ONE_RANK:
        found = MeshShape(**sizes)
        if max(ranks, found.ranks) > 1:
            raise ConfigError(
                f"inner = {inner or 'local'!r} computes on one rank",
                given=f"ranks = {ranks}, mesh {found}",
                expected="one of ddp, fsdp, tensor, pipeline, hybrid",
                remedy='inner = "fsdp" in [strategy]',
            )
        return MeshShape()
    if inner in AXIS_OF:
        return _one_axis(inner, ranks, sizes)
    if inner != HYBRID:
        raise unknown("inner in [strategy]", inner, (*ONE_RANK[1:], *AXIS_OF, HYBRID))
    found = MeshShape(**sizes)
    if found.ranks == 1:
        raise ConfigError(
            "inner = 'hybrid' needs a mesh", given=f"ranks = {ranks}, mesh = {dict(mesh)}",
            expected="how many ranks each axis has",
            remedy=f"mesh = {{replicate = 2, tensor = {max(2, ranks // 2)}}} in [island]",
        )  # fmt: skip
    if ranks and found.ranks != ranks:
        raise _does_not_divide(found, ranks)
    return found


def _checked(mesh: Mapping[str, Any]) -> dict[str, int]:
    for axis, size in mesh.items():
        if axis not in AXES:
            raise unknown("axis of a mesh", axis, AXES)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"the mesh's {axis} is not a number of ranks",
                given=repr(size),
                expected="1 or more",
            )
    return {axis: int(size) for axis, size in mesh.items()}


def _one_axis(inner: str, ranks: int, sizes: Mapping[str, int]) -> MeshShape:
    axis = AXIS_OF[inner]
    others = {name: size for name, size in sizes.items() if name != axis and size > 1}
    if others:
        raise ConfigError(
            f"inner = {inner!r} has the axis {axis} only", given=f"mesh = {dict(sizes)}",
            remedy='inner = "hybrid" for more than one axis',
        )  # fmt: skip
    size = sizes.get(axis, ranks)
    if ranks and size != ranks:
        raise ConfigError(
            "the mesh and the ranks of an island are different",
            given=f"{axis} = {size} in mesh, ranks = {ranks}", expected=f"ranks = {size}",
            remedy="leave mesh out: an inner strategy with one axis needs only ranks",
        )  # fmt: skip
    if size < 1:
        raise ConfigError(
            f"inner = {inner!r} needs ranks", given="ranks = 0", remedy="ranks = 2 in [island]"
        )
    return MeshShape(**{axis: size})


def _does_not_divide(found: MeshShape, ranks: int) -> ConfigError:
    """Return the error of a mesh with another number of ranks, suggesting the nearest."""
    rest = found.pipeline * found.tensor
    nearest = max(1, round(ranks / rest)) * rest
    fitting = dataclasses.replace(found, replicate=nearest // rest, shard=1)
    return ConfigError(
        "the mesh does not divide the ranks", given=f"mesh {found}, which is {found.ranks}",
        expected=f"{ranks} ranks",
        remedy=f"mesh {fitting} makes {nearest}: set ranks = {nearest}",
    )  # fmt: skip


def shrunk(shape: MeshShape, ranks: int) -> MeshShape:
    """Return the largest mesh of at most this many ranks with the same pipeline and tensor axes.

    Reduces `replicate` before `shard`; unchanged if not even one copy of the model fits.
    """
    rest = shape.pipeline * shape.tensor
    data = min(shape.data, ranks // rest)
    if data < 1:
        return shape
    shards = min(shape.shard, data)  # never more replicas than before: they may not fit
    return dataclasses.replace(shape, replicate=min(shape.replicate, data // shards), shard=shards)
