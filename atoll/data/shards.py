"""Training tokens assigned to slots, so that no token is read by two members.

    token    one id
    window   ``context`` inputs and their targets, which are the same tokens shifted by one
    block    neighbouring windows; the unit of assignment
    slot     a stream of data, leased to one member at a time

When a member is lost, another one continues its slot from the cursor: no token is lost or read
twice.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.assignment import Assignment
from atoll.data.order import permutation
from atoll.errors import ConfigError, DataError, unknown

ORDERS = ("contiguous", "shuffled")
"""``shuffled``: random blocks, so that shards are alike. ``contiguous``: one stretch of the text
per slot, so that shards differ like data of different owners.
"""

_WINDOWS_PER_BLOCK = 64
_MIN_BLOCKS_PER_SLOT = 16
_ORDER_KEY = 0x64656166


class Shards:
    """The blocks of every slot; a pure function of its arguments, the same on every member."""

    def __init__(
        self,
        tokens: Tensor,
        *,
        slots: int,
        context: int,
        seed: int,
        order: str = "shuffled",
        block_tokens: int | None = None,
    ) -> None:
        """Assign ``tokens`` to ``slots``.

        Args:
            tokens: 1-D integer ids; not copied.
            slots: Number of streams, usually the members at the start.
            context: Length of a window.
            seed: Determines the assignment.
            order: One of :data:`ORDERS`.
            block_tokens: Size of a block, more than ``context``; default: 64 windows, fewer for
                short texts.

        Raises:
            ConfigError: an unknown order, or a number out of range.
            DataError: too few tokens for one block per slot; states both numbers.
        """
        if order not in ORDERS:
            raise unknown("data order", order, ORDERS)
        if slots < 1 or context < 1 or (block_tokens is not None and block_tokens <= context):
            raise ConfigError(
                "the data cannot be split with these numbers",
                given=f"slots={slots}, context={context}, block_tokens={block_tokens}",
                expected="slots and context of 1 or more, block_tokens above context",
            )
        self.slots = slots
        self.context = context
        self.seed = seed
        self.order = order
        self._tokens = tokens.detach().cpu().numpy()
        size = block_tokens or _block_tokens(len(tokens), slots, context)
        num_blocks = len(tokens) // size
        if num_blocks < slots:
            raise DataError(
                "too few tokens to train on",
                given=f"{len(tokens)} tokens",
                expected=f"at least {slots * size}: a block of {size} for each of {slots} slots",
                remedy="name more text, fewer nodes or a shorter context",
            )
        self.block_tokens = size
        self._blocks = _deal(num_blocks, slots=slots, seed=seed, order=order)
        self._windows_per_block = (size - 1) // context
        self._reach = np.arange(context + 1, dtype=np.int64)

    def num_windows(self, slot: int) -> int:
        """Return the number of windows of a slot."""
        return len(self._blocks[self._known(slot)]) * self._windows_per_block

    def starts(self, slot: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position in the training tokens at which each window of a slot begins."""
        block, inside = np.divmod(windows, self._windows_per_block)
        starts: NDArray[np.int64] = self._blocks[slot][block] * self.block_tokens
        starts += inside * self.context
        return starts

    def windows(self, slot: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of some windows of a slot, int64 ``(windows, context + 1)``."""
        positions = self.starts(slot, windows)[:, None] + self._reach
        tokens: NDArray[np.int64] = self._tokens[positions].astype(np.int64)
        return tokens

    def batch(self, slot: int, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return windows of a slot as inputs and targets, int64 ``(windows, context)`` each."""
        tokens = torch.from_numpy(self.windows(slot, windows))
        return tokens[:, :-1], tokens[:, 1:]

    def assignment(self) -> Assignment:
        """Return the blocks as documents, each of which belongs to its slot."""
        slots = np.empty(sum(map(len, self._blocks)), dtype=np.int32)
        for slot, blocks in enumerate(self._blocks):
            slots[blocks] = slot
        bounds = np.arange(len(slots) + 1, dtype=np.int64) * self.block_tokens
        return Assignment(bounds, slots[:, None], self.slots)

    def _known(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ConfigError("no such data slot", given=slot, expected=f"0 to {self.slots - 1}")
        return slot


def _block_tokens(tokens: int, slots: int, context: int) -> int:
    """Return the size of a block: whole windows, and several blocks per slot where possible.

    One more than its windows, because the last target follows the last input.
    """
    windows = tokens // (slots * _MIN_BLOCKS_PER_SLOT * context)
    return context * min(max(windows, 1), _WINDOWS_PER_BLOCK) + 1


def _deal(num_blocks: int, *, slots: int, seed: int, order: str) -> list[NDArray[np.int64]]:
    if order == "contiguous":
        return np.array_split(np.arange(num_blocks, dtype=np.int64), slots)
    shuffled = permutation(num_blocks, key=(seed, _ORDER_KEY))
    return [np.ascontiguousarray(shuffled[slot::slots]) for slot in range(slots)]
