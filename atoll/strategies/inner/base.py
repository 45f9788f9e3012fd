"""One rank's part of a model that is spread over an island: what every inner strategy makes.

Which rows of an island's batch a rank computes on, and in which parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.config.train_checks import check_rows
from atoll.errors import ConfigError


class Parts(Protocol):
    """A rank's part of a model, ready to train.

    Built by `spread` on every rank from the same whole model. Names are those of the whole model.
    """

    mesh: DeviceMesh
    """All four axes of `atoll.config.AXES`."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what of the whole model's trained parameters is here, in the model's order.

        A plain tensor is the whole parameter; a DTensor says by its placements which part it is. A
        parameter that is on no rank of this pipeline stage is missing.
        """
        ...

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the saved floating-point buffers, by name; equal on all ranks that have them."""
        ...

    def untrained(self) -> Mapping[str, Tensor]:
        """Return what else of the model's state is here, by name.

        Frozen parameters, as trained ones lie, and saved buffers that are no floating-point
        numbers, equal on all ranks that have them.
        """
        ...

    def backward(
        self, inputs: Tensor, targets: Tensor, *, scale: float = 1.0, summed: bool = True
    ) -> Tensor:
        """Compute gradients of a batch; collective.

        Afterwards gradients are those of the mean loss over the whole batch, times `scale`, on
        every rank: reduced over ranks that hold the same parameter, summed over accumulated parts.

        Args:
            inputs: The island's whole batch, (rows, ...); each rank takes its rows by itself.
            targets: What belongs to it, (rows, ...).
            scale: Of the loss, against underflow in half precision.
            summed: Whether the ranks add up the loss; else the caller does, with what else it has.

        Returns:
            The mean loss over the whole batch without `scale`, a scalar on every rank; if it is not
            `summed`, this rank's share: the shares of all ranks are the mean.

        Raises:
            ConfigError: the rows cannot be dealt out evenly.
        """
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a whole batch without gradients, on every rank; collective.

        The rows need not be divisible: what is missing is filled up and does not count.
        """
        ...

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        ...


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
