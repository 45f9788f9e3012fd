"""Microbatches by number: the batches of one stream, cut, in any order and on any machine."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.dataset import HeldOutBatches
from atoll.data.stream import Deal, pass_order
from atoll.errors import ConfigError


class Microbatches:
    """Inputs and targets of microbatch (step, index), a pure function of both numbers.

    The microbatches of a step are together the batch that a :class:`BatchStream` of slot 0 returns
    in that step, or of another slot if members with the whole model have data of their own. Not
    thread-safe.
    """

    def __init__(self, shards: Deal, *, rows: int, count: int, slot: int = 0) -> None:
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
        self._slot, self._size = slot, shards.num_windows(slot)
        self._orders: dict[int, NDArray[np.int64]] = {}
        """Of the two newest passes: a step may lie in both."""

    def __call__(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (rows, ...) each."""
        first = (step * self._count + index) * self._rows
        places = range(first, first + self._rows)
        windows = [self._order(place // self._size)[place % self._size] for place in places]
        return self._shards.batch(self._slot, np.asarray(windows, dtype=np.int64))

    def _order(self, data_pass: int) -> NDArray[np.int64]:
        if data_pass not in self._orders:
            if len(self._orders) == 2:
                del self._orders[min(self._orders)]
            self._orders[data_pass] = pass_order(self._shards, slot=self._slot, data_pass=data_pass)
        return self._orders[data_pass]


class HeldOutMicrobatches:
    """Held-out batches by number: first those of about `limit_tokens` targets, then all of them.

    Each is a pure function of its number. `sizes` are the counts of both kinds.
    """

    def __init__(self, batches: HeldOutBatches, *, rows: int, limit_tokens: int) -> None:
        """Cut the held-out samples into batches of `rows` rows, the last one may have fewer.

        Raises:
            DataError: there is too little held-out text.
        """
        self._batches, self._rows, self._limits = batches, rows, (limit_tokens, None)
        self.sizes = tuple(
            bisect.bisect_left(range(1 << 40), True, key=lambda n: self._find(n, limit) is None)
            for limit in self._limits
        )

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (rows, ...) each; raises IndexError beyond the last one."""
        last = number >= self.sizes[0]
        found = self._find(number - last * self.sizes[0], self._limits[last])
        if found is None:
            raise IndexError(number)
        return found

    def _find(self, number: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
        batches = self._batches(batch=self._rows, limit_tokens=limit, first=number)
        return next(iter(batches), None)
