"""Examples put into rows of a fixed length.

A row holds whole examples, each with positions that begin at 0. `transformers` derives from such
positions that tokens of one example attend to that example only, so a packed example has the
logits that it has alone. Inputs and targets are shifted inside an example: no token of one is
predicted from another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""Target of a position that is not trained on; torch's `cross_entropy` skips it."""

UNMATCHED = 1 << 40
"""Targets of an answer to another prompt are below `IGNORED` by more than this."""


def pack_rows(
    lengths: NDArray[np.int64], order: NDArray[np.int64], *, length: int, pack: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assign examples to rows by best fit; return them by row, and the bounds of the rows.

    Args:
        lengths: Positions that each example takes, ``(examples,)``, at most `length`.
        order: Examples in the order in which they are placed; may repeat or omit some.
        length: Positions of a row.
        pack: Whether a row may hold several examples.

    Returns:
        Numbers of examples ``(placed,)`` and bounds ``(rows + 1,)``: row `r` holds
        ``examples[bounds[r] : bounds[r + 1]]``.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (positions left, row), sorted
    for example in order.tolist():
        wanted = int(lengths[example])
        at = bisect_left(free, (wanted, -1)) if pack else len(free)
        if at == len(free):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = free.pop(at)
        rows[row].append(example)
        if pack and left > wanted:
            insort(free, (left - wanted, row))
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), sizes.cumsum()])
    flat = np.array([example for row in rows for example in row], dtype=np.int64)
    return flat, bounds


class Tokens(NamedTuple):
    """All examples: ids, whether each is trained, and where each example begins and ends."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    bounds: NDArray[np.int64]


class Rows:
    """Packed rows of examples; the tokens may be in a file that memory does not hold."""

    def __init__(
        self,
        tokens: Tokens,
        order: NDArray[np.int64],
        *,
        length: int,
        pack: bool,
        pairs: bool = False,
        good: NDArray[np.bool_] | None = None,
    ) -> None:
        """Pack the examples ``ids[bounds[e] : bounds[e + 1]]`` of `order`.

        With `pairs`, example `e` is the two sequences 2e and 2e + 1, in a row of their own: the
        preferred answer and the other one. With `good` too, ``(examples,)``, they are a labelled
        answer, and its prompt with the answer to another prompt.
        """
        self._ids, self._trained, self._bounds = tokens
        self.length = length
        self.pairs, self.good = pairs, good
        lengths = np.diff(self._bounds) - 1
        lengths = lengths.reshape(-1, 2).sum(1) if pairs else lengths
        self._examples, self._rows = pack_rows(lengths, order, length=length, pack=pack)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows) - 1

    def examples(self, row: int) -> list[int]:
        """Return the examples of a row."""
        found: list[int] = self._examples[self._rows[row] : self._rows[row + 1]].tolist()
        return [half for one in found for half in (2 * one, 2 * one + 1)] if self.pairs else found

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return an example's ids, and whether each is trained."""
        part = slice(int(self._bounds[number]), int(self._bounds[number + 1]))
        return self._ids[part], self._trained[part]

    def batch(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return rows, cut at the longest of them.

        Returns:
            Inputs int64 ``(rows, 2, used)``: ids, and positions; targets int64 ``(rows, used)``,
            `IGNORED` where nothing is trained. What is left of a row is an example of zeros. Of
            pairs, inputs ``(rows, 3, used)`` have the following tokens, too, and the targets of
            an answer that is not preferred are below `IGNORED`: ``IGNORED - 1 - token``, less
            `UNMATCHED` where it answers another prompt.
        """
        count = len(rows)
        inputs = np.zeros((count, 2 + self.pairs, self.length), dtype=np.int64)
        targets = np.full((count, self.length), IGNORED, dtype=np.int64)
        longest = 1
        for number, row in enumerate(rows.tolist()):
            at = 0
            for example in self.examples(row):
                start, end = int(self._bounds[example]), int(self._bounds[example + 1])
                size = end - start - 1
                inputs[number, 0, at : at + size] = self._ids[start : end - 1]
                inputs[number, 1, at : at + size] = np.arange(size)
                following = self._ids[start + 1 : end].astype(np.int64)
                if self.pairs:
                    inputs[number, 2, at : at + size] = following
                    following = self._marked(following, example)
                wanted = self._trained[start + 1 : end]
                targets[number, at : at + size] = np.where(wanted, following, IGNORED)
                at += size
            inputs[number, 1, at:] = np.arange(self.length - at)
            longest = max(longest, at)
        return torch.from_numpy(inputs[:, :, :longest]), torch.from_numpy(targets[:, :longest])

    def _marked(self, tokens: NDArray[np.int64], example: int) -> NDArray[np.int64]:
        """Return the targets of one of a pair of answers."""
        second = bool(example % 2)
        if self.good is None:
            return IGNORED - 1 - tokens if second else tokens
        if second:
            return IGNORED - 1 - UNMATCHED - tokens
        return tokens if self.good[example // 2] else IGNORED - 1 - tokens
