"""Training tokens of the paths of a modular model, and a held-out part of each path's own.

A path is a slot, and reads the windows of its documents, joined in the order of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.assignment import Assignment
from atoll.data.order import hashes
from atoll.errors import ConfigError, DataError

_HELD_OUT_KEY = 0x7061_7468
_KEPT = 4
"""Paths whose tokens stay in memory."""


@dataclass(frozen=True, slots=True)
class PathTokens:
    """The tokens of a path."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    """Empty: nothing is held out."""


class PathShards:
    """The windows of every path, see :class:`~atoll.data.Deal`; a pure function of its arguments.

    Whole documents are held out, the same ones on all of their paths: those with the smallest
    hashes. A path with none of these holds out one of its own; a single document is cut.
    """

    def __init__(
        self, tokens: Tensor, assignment: Assignment, *, context: int, seed: int,
        held_out: float = 0.0,
    ) -> None:  # fmt: skip
        """Cut windows of `context` inputs; a share `held_out` of the documents is not trained on.

        Raises:
            DataError: the assignment is of other tokens, or a path has too few for a window.
        """
        if assignment.bounds[-1] > len(tokens):
            raise DataError(
                "documents are assigned to paths beyond the end of the training tokens",
                given=f"{assignment.bounds[-1]} tokens assigned, {len(tokens)} to train on",
                expected="an assignment of this corpus, with this tokenizer",
                remedy="assign the documents again, or leave assignment in [dipaco] out",
            )
        self.seed = seed
        self.context = context
        self._tokens = tokens.detach().cpu().numpy()
        self._assignment, self._share = assignment, held_out
        self._hashes = hashes(len(assignment.paths), key=(seed, _HELD_OUT_KEY))
        self.path = lru_cache(_KEPT)(self._read)
        """Returns the tokens of a path."""
        self._reach = np.arange(context + 1, dtype=np.int64)
        self._check()

    def _check(self) -> None:
        counts = self._assignment.tokens()
        least = (self.context + 1) * (2 if self._share else 1)
        poor = [path for path, count in enumerate(counts) if count < least]
        if poor:
            raise DataError(
                "paths have too few tokens to train on",
                given=", ".join(f"path {path}: {counts[path]}" for path in poor[:8]),
                expected=f"at least {least} for a context of {self.context}",
                remedy="more text, fewer modules in [dipaco], a shorter context, or documents "
                "balanced over the paths",
            )

    @property
    def weights(self) -> list[float]:
        """The tokens of each path, divided by their mean over all paths."""
        counts = self._assignment.tokens().astype(np.float64)
        return [float(weight) for weight in counts / counts.mean()]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Documents and tokens of each path, held-out ones included."""
        counts = self._assignment.tokens()
        return [
            (len(self._assignment.documents(path)), int(count)) for path, count in enumerate(counts)
        ]

    def num_windows(self, slot: int) -> int:
        """Return the number of windows of a path; raises ConfigError if there is no such path."""
        return (len(self.path(slot).train) - 1) // self.context

    def batch(self, slot: int, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return windows of a path as inputs and targets, int64 `(windows, context)` each."""
        return self._rows(self.path(slot).train, windows)

    def held_out(
        self, path: int, *, batch: int, limit_tokens: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is held out of a path, in the form of `batch`; at most so many targets."""
        tokens = self.path(path).held_out
        count = max(0, len(tokens) - 1) // self.context
        if limit_tokens is not None:
            count = min(count, max(1, limit_tokens // self.context))
        for first in range(0, count, batch):
            yield self._rows(tokens, np.arange(first, min(first + batch, count)))

    def _rows(self, tokens: NDArray[np.int64], windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        found = tokens[(windows * self.context)[:, None] + self._reach]
        rows = torch.from_numpy(found)
        return rows[:, :-1], rows[:, 1:]

    def _read(self, path: int) -> PathTokens:
        if not 0 <= path < self._assignment.num_paths:
            raise ConfigError(
                "no such path", given=path, expected=f"0 to {self._assignment.num_paths - 1}"
            )
        documents = self._assignment.documents(path)
        if not self._share:
            return PathTokens(self._joined(documents), np.empty(0, np.int64))
        window, order = self.context + 1, np.argsort(self._hashes[documents], kind="stable")
        lengths = np.diff(self._assignment.bounds)[documents][order]
        mark = np.uint64(min(self._share, 1.0) * 2.0**64 - 1)
        count = int((self._hashes[documents] < mark).sum())
        reached = np.cumsum(lengths)
        count = max(count, int(np.searchsorted(reached, window)) + 1)
        while count and reached[-1] - (reached[count - 1] if count else 0) < window:
            count -= 1
        if count and reached[count - 1] >= window:
            held = np.sort(documents[order[:count]])
            kept = np.sort(documents[order[count:]])
            return PathTokens(self._joined(kept), self._joined(held))
        whole = self._joined(documents)
        cut = len(whole) - max(window, round(self._share * len(whole)))
        return PathTokens(whole[:cut], whole[cut:])

    def _joined(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        bounds = self._assignment.bounds
        parts = [self._tokens[bounds[d] : bounds[d + 1]] for d in documents]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
