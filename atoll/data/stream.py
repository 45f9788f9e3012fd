"""Endless batches of one slot, resumable at any window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.cursor import Cursor
from atoll.data.order import permutation
from atoll.errors import ConfigError, DataError

_ORDER_KEY = 0x70617373


class Deal(Protocol):
    """Samples (*windows*: stretches of text, or images) assigned to slots, e.g. `Shards`."""

    @property
    def seed(self) -> int:
        """Determines the assignment and the order within a slot."""
        ...

    def num_windows(self, slot: int) -> int:
        """Return the number of windows of a slot; raises ConfigError if there is no such slot."""
        ...

    def batch(self, slot: int, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some windows of a slot, by their numbers."""
        ...


class BatchStream(Iterator[tuple[Tensor, Tensor]]):
    """An endless iterator of ``(inputs, targets)``; of text int64 ``(batch, context)`` each.

    Every window of the shard comes once per pass, in an order that depends only on the shards'
    seed, the slot and the pass. The last batch of a pass is completed from the next pass.
    """

    def __init__(
        self, shards: Deal, *, slot: int, batch: int, cursor: Cursor | None = None
    ) -> None:
        """Start at ``cursor``, or at the beginning of the slot's shard.

        For an exact resume ``shards`` MUST be those of the cursor.

        Raises:
            ConfigError: no such slot, or a batch below 1.
            DataError: the cursor belongs to another slot or is beyond the end of the shard.
        """
        if batch < 1:
            raise ConfigError("the batch is too small", given=batch, expected="1 or more")
        self._shards = shards
        self._batch = batch
        self._size = shards.num_windows(slot)
        start = cursor or Cursor(slot)
        if start.slot != slot or not 0 <= start.offset < self._size:
            raise DataError(
                "the saved position does not fit the data",
                given=f"slot {start.slot}, window {start.offset}",
                expected=f"slot {slot}, window below {self._size}",
                remedy="resume with the corpus, nodes, context and seed of the first start",
            )
        self._slot = slot
        self._pass = start.data_pass
        self._offset = start.offset
        self._order = self._shuffled()

    @property
    def cursor(self) -> Cursor:
        """The position after the last batch; a new stream continues from it."""
        return Cursor(self._slot, self._pass, self._offset)

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        return self._shards.batch(self._slot, self._take())

    def _take(self) -> NDArray[np.int64]:
        parts: list[NDArray[np.int64]] = []
        missing = self._batch
        while missing:
            part = self._order[self._offset : self._offset + missing]
            parts.append(part)
            missing -= len(part)
            self._offset += len(part)
            if self._offset == self._size:
                self._pass, self._offset = self._pass + 1, 0
                self._order = self._shuffled()
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _shuffled(self) -> NDArray[np.int64]:
        return pass_order(self._shards, slot=self._slot, data_pass=self._pass)


def pass_order(shards: Deal, *, slot: int, data_pass: int) -> NDArray[np.int64]:
    """Return a slot's windows in the order in which a pass over the data takes them."""
    key = (shards.seed, _ORDER_KEY, slot, data_pass)
    return permutation(shards.num_windows(slot), key=key)
