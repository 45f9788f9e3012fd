"""The held-out split: text that no shard contains, the same on every member."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.data.order import permutation
from atoll.errors import ConfigError, DataError

HELD_OUT_CAP_BYTES = 262_144
"""At this size the standard error of the mean loss is below 0.5 %; more only costs time."""

SMALLEST_BLOCK = 64
_LARGEST_BLOCK = 4096
_MIN_BLOCKS = 200
_ORDER_KEY = 0x68656C64  # different from the shards' order for the same seed


@dataclass(frozen=True, slots=True)
class Split:
    """A text in two parts, each in its original order.

    Attributes:
        train: The text without the held-out blocks.
        held_out: The held-out blocks.
        held_out_blocks: Indices of these blocks.
        block_bytes: Size of a block; a shorter one at the end is trained on.
    """

    train: bytes
    held_out: bytes
    held_out_blocks: tuple[int, ...]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which blocks of a text are held out; the fields are those of :class:`Split`."""

    held_out_blocks: tuple[int, ...]
    block_bytes: int


def split_text(
    text: bytes, *, share: float, seed: int, cap_bytes: int = HELD_OUT_CAP_BYTES
) -> Split:
    """Split ``text`` into training and held-out parts, the same on every member.

    Args:
        text: The whole text.
        share: Held-out share, 0 < share < 1.
        seed: Selects the blocks, of at most 4 KiB.
        cap_bytes: Upper limit of the held-out part (at least one block).

    Raises:
        ConfigError: ``share`` is not between 0 and 1.
        DataError: the text is too small to hold anything out; states both sizes.
    """
    blocks = choose_blocks(len(text), share=share, seed=seed, cap_bytes=cap_bytes)
    train, held_out = _cut(text, blocks)
    return Split(train, held_out, blocks.held_out_blocks, blocks.block_bytes)


def choose_blocks(num_bytes: int, *, share: float, seed: int, cap_bytes: int) -> Blocks:
    """Return the blocks that :func:`split_text` holds out of a text of so many bytes."""
    if not 0.0 < share < 1.0:
        raise ConfigError(
            "the held-out share is out of range",
            given=share,
            expected="0 < held_out < 1, e.g. 0.05",
        )
    block_bytes = min(_LARGEST_BLOCK, max(SMALLEST_BLOCK, num_bytes // _MIN_BLOCKS))
    num_blocks = num_bytes // block_bytes
    if num_blocks < 2:
        raise DataError(
            "the text is too small to hold some of it out",
            given=f"{num_bytes} bytes",
            expected=f"at least {2 * SMALLEST_BLOCK} bytes",
            remedy="name more files",
        )
    wanted = min(round(share * num_blocks), cap_bytes // block_bytes)
    count = min(max(1, wanted), num_blocks - 1)
    chosen = np.sort(permutation(num_blocks, key=(seed, _ORDER_KEY))[:count])
    return Blocks(tuple(chosen.tolist()), block_bytes)


def _cut(text: bytes, blocks: Blocks) -> tuple[bytes, bytes]:
    whole = np.frombuffer(text, dtype=np.uint8)
    is_held_out = np.zeros(-(-len(whole) // blocks.block_bytes), dtype=bool)
    is_held_out[list(blocks.held_out_blocks)] = True
    mask = np.repeat(is_held_out, blocks.block_bytes)[: len(whole)]
    return whole[~mask].tobytes(), whole[mask].tobytes()
