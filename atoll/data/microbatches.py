"""Microbatches by number: the batches of one stream, cut, in any order and on any machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.stream import Deal, pass_order
from atoll.errors import ConfigError


class Microbatches:
    """Inputs and targets of microbatch (step, index), a pure function of both numbers.

    The microbatches of a step are together the batch that a :class:`BatchStream` of slot 0 returns
    in that step. Not thread-safe.
    """

    def __init__(self, shards: Deal, *, rows: int, count: int) -> None:
        """Cut every batch into `count` microbatches of `rows` rows.

        Raises:
            ConfigError: one of them is below 1.
        """
        if min(rows, count) < 1:
            raise ConfigError(
                "a microbatch without rows, or a step without microbatches",
                given=f"{count} microbatches of {rows} rows", expected="1 or more of each",
            )  # fmt: skip
        self._shards, self._rows, self._count = shards, rows, count
        self._size = shards.num_windows(0)
        self._orders: dict[int, NDArray[np.int64]] = {}
        """Of the two newest passes: a step may lie in both."""

    def __call__(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (rows, ...) each."""
        first = (step * self._count + index) * self._rows
        places = range(first, first + self._rows)
        windows = [self._order(place // self._size)[place % self._size] for place in places]
        return self._shards.batch(0, np.asarray(windows, dtype=np.int64))

    def _order(self, data_pass: int) -> NDArray[np.int64]:
        if data_pass not in self._orders:
            if len(self._orders) == 2:
                del self._orders[min(self._orders)]
            self._orders[data_pass] = pass_order(self._shards, slot=0, data_pass=data_pass)
        return self._orders[data_pass]
