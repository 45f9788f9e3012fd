"""The interface of a rank's part of a model, and the rows of the batch that the rank computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
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

    Every rank builds it from the same whole model; names are those of the whole model.
    """

    mesh: DeviceMesh
    """All four axes of `atoll.config.AXES`."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the trained parameters on this rank, in the model's order.

        A plain tensor is the whole parameter; the placements of a DTensor describe its part.
        Parameters of other pipeline stages are missing.
        """
        ...

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the saved floating-point buffers, by name; equal on all ranks that have them."""
        ...

    def untrained(self) -> Mapping[str, Tensor]:
        """Return the rest of the model's state on this rank, by name.

        These are frozen parameters, laid out as trained ones, and saved buffers that are not
        floating-point, equal on all ranks that have them.
        """
        ...

    def backward(
        self, inputs: Tensor, targets: Tensor, *, scale: float = 1.0, summed: bool = True
    ) -> Tensor:
        """Compute gradients of a batch; collective.

        Afterwards every rank has the gradients of the mean loss over the whole batch, times
        `scale`: reduced over ranks with the same parameter, summed over accumulation steps.

        Args:
            inputs: The island's whole batch, (rows, ...); each rank selects its rows.
            targets: Its targets, (rows, ...).
            scale: Of the loss, against underflow in half precision.
            summed: Whether the loss is summed over the ranks; otherwise the caller does that.

        Returns:
            The mean loss over the whole batch without `scale`, a scalar on every rank; if not
            `summed`, this rank's share, of which the sum over all ranks is the mean.

        Raises:
            ConfigError: the rows cannot be divided evenly.
        """
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a whole batch without gradients, on every rank; collective.

        Any number of rows is allowed: missing ones are padded and have weight 0.
        """
        ...

    def train(self, mode: bool) -> None:
        """Switch between training and evaluation mode."""
        ...

    @property
    def constrained(self) -> bool:
        """Whether `constrain` may change parameters; equal on all ranks."""
        ...

    def constrain(self) -> None:
        """Restore the constraint on parameters after others were loaded; collective."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """Surround an optimizer's step so that it keeps the constraint on parameters; local.

        Inside, parameters and gradients may be expressed in other coordinates.
        """
        ...


dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

DATA_AXES = ("replicate", "shard")
"""Mesh axes along which ranks have different rows."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One rank's rows of every batch, in parts computed one after the other.

    All ranks of one pipeline or tensor group have the same rows.
    """

    rank: int = 0
    """Number among the ranks with different rows."""
    ranks: int = 1
    accumulate: int = 1
    microbatches: int = 1
    """Microbatches per accumulation step, for a pipeline."""

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
        """Parts of a batch over all ranks; the number of rows MUST be a multiple."""
        return self.ranks * self.accumulate * self.microbatches

    def check(self, rows: int) -> None:
        """Raise ConfigError, naming the nearest valid numbers, if the rows do not divide evenly."""
        check_rows(
            rows, ranks=self.ranks, accumulate=self.accumulate, microbatches=self.microbatches
        )

    def share(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's rows of every tensor, without a copy; raises as :meth:`check`."""
        rows = _rows(batch)
        self.check(rows)
        each = rows // self.ranks
        return tuple(t[self.rank * each : (self.rank + 1) * each] for t in batch)

    def deal(self, *batch: Tensor) -> list[tuple[Tensor, ...]]:
        """Return this rank's rows by accumulation step; raises as :meth:`check`."""
        share = self.share(*batch)
        each = len(share[0]) // self.accumulate
        starts = range(0, each * self.accumulate, each)
        return [tuple(t[start : start + each] for t in share) for start in starts]

    def fill(self, *batch: Tensor) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
        """Yield this rank's parts of any number of rows, each with its share of the whole.

        Every rank gets the same number of parts. A rank without rows computes the first row with
        weight 0, because its peers need it in their collectives.
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
    """Add up a tensor in place over the ranks with different rows; return it. Collective."""
    names, sizes = mesh.mesh_dim_names or (), mesh.shape
    for axis in DATA_AXES:
        if sizes[names.index(axis)] > 1:  # slicing the mesh would take longer than the sum
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value
