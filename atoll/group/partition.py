"""Cutting a vector into one chunk per member."""

from __future__ import annotations


def partition(elements: int, parts: int, *, block: int = 1) -> list[int]:
    """Return the sizes of `parts` consecutive chunks of a vector of `elements`.

    Every chunk but the last non-empty one is a multiple of `block`, so that encoding a chunk
    uses the same blocks as encoding the whole, and no two differ by more than one block.

    Args:
        elements: Length of the vector, >= 0.
        parts: Number of chunks, >= 1.
        block: Elements that must stay together.

    Returns:
        `parts` sizes that add up to `elements`; trailing ones may be 0.
    """
    blocks = -(-elements // block)
    share, extra = divmod(blocks, parts)
    sizes: list[int] = []
    left = elements
    for index in range(parts):
        size = min(left, (share + (index < extra)) * block)
        sizes.append(size)
        left -= size
    return sizes
