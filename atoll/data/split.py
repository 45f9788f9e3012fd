"""The held-out split: text that no shard contains, the same on every member."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.data.order import permutation
from atoll.errors import ConfigError, DataError

HELD_OUT_CAP_BYTES = 262_144
"""At this size the standard error of the mean loss is below 0.5 %; more would only cost time."""

SMALLEST_BLOCK = 64
_LARGEST_BLOCK = 4096
_MIN_BLOCKS = 200
_ORDER_KEY = 0x68656C64  # another order than the shards' for the same seed


@dataclass(frozen=True, slots=True)
class Split:
    """A text in two parts.

    Attributes:
        train: What may be trained on, in its original order, the held-out blocks cut out.
        held_out: The held-out blocks, in their original order.
        held_out_blocks: Which blocks these are.
        block_bytes: Size of a block; the last one of a text may be shorter and is trained on.
    """

    train: bytes
    held_out: bytes
    held_out_blocks: tuple[int, ...]
    block_bytes: int


def split_text(
    text: bytes, *, share: float, seed: int, cap_bytes: int = HELD_OUT_CAP_BYTES
) -> Split:
    """Return ``text`` split into training and held-out parts.

    Blocks of at most 4 KiB are selected by the seed, so the held-out part is a fair sample and the
    same on every member.

    Args:
        text: The whole text.
        share: How much is held out, 0 < share < 1.
        seed: Selects the blocks.
        cap_bytes: At most this much is held out (at least one block is).

    Raises:
        ConfigError: ``share`` is not between 0 and 1.
        DataError: the text is too small to hold anything out; both sizes are named.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(
            "the held-out share makes no sense", given=share, expected="0 < held_out < 1, e.g. 0.05"
        )
    block_bytes = min(_LARGEST_BLOCK, max(SMALLEST_BLOCK, len(text) // _MIN_BLOCKS))
    num_blocks = len(text) // block_bytes
    if num_blocks < 2:
        raise DataError(
            "the text is too small to hold some of it out",
            given=f"{len(text)} bytes",
            expected=f"at least {2 * SMALLEST_BLOCK} bytes",
            remedy="name more files",
        )
    wanted = min(round(share * num_blocks), cap_bytes // block_bytes)
    count = min(max(1, wanted), num_blocks - 1)
    chosen = np.sort(permutation(num_blocks, key=(seed, _ORDER_KEY))[:count])
    train, held_out = _cut(text, chosen, block_bytes)
    return Split(train, held_out, tuple(chosen.tolist()), block_bytes)


def _cut(text: bytes, chosen: NDArray[np.int64], block_bytes: int) -> tuple[bytes, bytes]:
    """Return the text without the chosen blocks, and these blocks."""
    whole = np.frombuffer(text, dtype=np.uint8)
    is_held_out = np.zeros(-(-len(whole) // block_bytes), dtype=bool)
    is_held_out[chosen] = True
    mask = np.repeat(is_held_out, block_bytes)[: len(whole)]
    return whole[~mask].tobytes(), whole[mask].tobytes()
