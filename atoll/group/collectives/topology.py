"""Who talks to whom in a collective: rings, trees, grids and partners; pure, no torch.

Cutting a vector into one chunk per member.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreePosition:
    """One member's place in a tree; members are numbered from 0."""

    parent: int
    """-1: it is the root."""
    children: tuple[int, ...]


def tree_positions(rank: int, members: int) -> tuple[TreePosition, TreePosition]:
    """Return a member's places in two binary trees, each of which carries half of a vector.

    Whoever has children in one tree is a leaf in the other, so that nobody sends a vector more than
    twice. Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan".

    Args:
        rank: The member.
        members: How many there are, >= 1.
    """
    if members % 2:  # one further: even and odd numbers change places
        moved = _place((rank - 1) % members, members)
        back = [_turned(other, 1, members) for other in (moved.parent, *moved.children)]
    else:  # the other way round
        moved = _place(members - 1 - rank, members)
        back = [_mirrored(other, members) for other in (moved.parent, *moved.children)]
    return _place(rank, members), TreePosition(back[0], tuple(back[1:]))


def _turned(rank: int, by: int, members: int) -> int:
    return -1 if rank < 0 else (rank + by) % members


def _mirrored(rank: int, members: int) -> int:
    return -1 if rank < 0 else members - 1 - rank


def _place(rank: int, members: int) -> TreePosition:
    """Return a place in the tree in which odd numbers are leaves and 0 is the root.

    The lowest set bit of a number says how high it stands: its parent has the next higher one.
    """
    bit = 1
    while bit < members and not rank & bit:
        bit <<= 1
    parent = -1
    if rank:
        parent = (rank ^ bit) | (bit << 1)
        if parent >= members:
            parent = rank ^ bit
    below = bit >> 1
    children = []
    if rank and below:
        children.append(rank - below)
    while below and rank + below >= members:
        below >>= 1
    if below:
        children.append(rank + below)
    return TreePosition(parent, tuple(children))


def group_size(members: int) -> int:
    """Return how many neighbours form a group: the largest divisor up to the square root."""
    return max(size for size in range(1, members + 1) if members % size == 0 and size**2 <= members)


def folded(members: int) -> int:
    """Return the largest power of two up to `members`: so many take part in a butterfly."""
    return 1 << (members.bit_length() - 1)


def halves(rank: int, active: int, elements: int) -> list[tuple[int, int, int]]:
    """Return what a member of a butterfly keeps: (partner, start, stop) of every halving.

    Args:
        rank: The member, below `active`.
        active: How many take part, a power of two.
        elements: Length of the vector.
    """
    start, stop, found = 0, elements, []
    distance = active // 2
    while distance:
        middle = start + (stop - start + 1) // 2
        start, stop = (middle, stop) if rank & distance else (start, middle)
        found.append((rank ^ distance, start, stop))
        distance //= 2
    return found


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
