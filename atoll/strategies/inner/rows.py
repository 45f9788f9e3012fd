"""Which rows of an island's batch a rank computes on, and in which parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.config.train_checks import check_rows
from atoll.errors import ConfigError

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

DATA_AXES = ("replicate", "shard")
"""Axes of a mesh whose ranks see different rows."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One rank's share of every batch: a stretch of its rows, in parts done one after the other.

    Ranks of one pipeline or one tensor group have the same share.
    """

    rank: int = 0
    """Number among the ranks that see different rows."""
    ranks: int = 1
    accumulate: int = 1
    """Parts of the share, whose gradients are summed."""
    microbatches: int = 1
    """Parts of such a part, for a pipeline."""

    @classmethod
    def of(cls, mesh: DeviceMesh, *, accumulate: int = 1, microbatches: int = 1) -> Rows:
        """Return the share of this rank of a mesh with the axes `replicate` and `shard`."""
        replicate, shard = (mesh.get_local_rank(axis) for axis in DATA_AXES)
        shards = mesh["shard"].size()
        return cls(
            rank=replicate * shards + shard, ranks=mesh["replicate"].size() * shards,
            accumulate=accumulate, microbatches=microbatches,
        )  # fmt: skip

    @property
    def parts(self) -> int:
        """Parts that a batch has over all ranks: its rows have to be a multiple."""
        return self.ranks * self.accumulate * self.microbatches

    def check(self, rows: int) -> None:
        """Raise if a batch of so many rows cannot be dealt out evenly.

        Raises:
            ConfigError: with the numbers and the nearest that work.
        """
        check_rows(
            rows, ranks=self.ranks, accumulate=self.accumulate, microbatches=self.microbatches
        )

    def share(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's rows of every tensor, without a copy.

        Raises:
            ConfigError: the rows cannot be dealt out evenly, or differ in number.
        """
        rows = _rows(batch)
        self.check(rows)
        each = rows // self.ranks
        return tuple(t[self.rank * each : (self.rank + 1) * each] for t in batch)

    def deal(self, *batch: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the accumulated parts of this rank's rows, in order.

        Raises:
            ConfigError: the rows cannot be dealt out evenly, or differ in number.
        """
        share = self.share(*batch)
        each = len(share[0]) // self.accumulate
        starts = range(0, each * self.accumulate, each)
        return [tuple(t[start : start + each] for t in share) for start in starts]

    def fill(self, *batch: Tensor) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
        """Yield this rank's parts of any number of rows, each with its share of the whole.

        Every rank gets equally many parts. One with no rows left computes on the first row, which
        counts nothing: its peers need it in their collectives.
        """
        rows = _rows(batch)
        parts = self.ranks * min(self.accumulate, -(-rows // self.ranks))
        each, more = divmod(rows, parts)
        mine = parts // self.ranks
        for part in range(self.rank * mine, (self.rank + 1) * mine):
            start = part * each + min(part, more)
            count = each + (part < more)
            at = slice(start, start + count) if count else slice(0, 1)
            yield count / rows, tuple(t[at] for t in batch)


def _rows(batch: tuple[Tensor, ...]) -> int:
    counts = [len(t) for t in batch]
    if min(counts) != max(counts) or not counts[0]:
        raise ConfigError(
            "inputs and targets have no rows, or not the same number",
            given=" and ".join(str(tuple(t.shape)) for t in batch),
            expected="one row of targets for each row of inputs",
        )
    return counts[0]


def sum_over_data(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add up a tensor in place over the ranks that see different rows; return it. Collective."""
    names, sizes = mesh.mesh_dim_names or (), mesh.shape
    for axis in DATA_AXES:
        if sizes[names.index(axis)] > 1:  # to slice a mesh takes longer than the sum
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value
