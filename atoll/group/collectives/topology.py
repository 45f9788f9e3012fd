"""Topologies of collectives (rings, trees, groups, partners) and chunk sizes; without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreePosition:
    """One member's position in a tree; members are numbered from 0."""

    parent: int
    """-1 for the root."""
    children: tuple[int, ...]


def tree_positions(rank: int, members: int) -> tuple[TreePosition, TreePosition]:
    """Return a member's positions in two binary trees, each with half of a vector.

    An inner node of one tree is a leaf in the other, so that no member sends a vector more than
    twice. Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan".
    """
    if members % 2:  # shifted by one, so that even and odd numbers change roles
        moved = _place((rank - 1) % members, members)
        back = [_turned(other, 1, members) for other in (moved.parent, *moved.children)]
    else:  # mirrored
        moved = _place(members - 1 - rank, members)
        back = [_mirrored(other, members) for other in (moved.parent, *moved.children)]
    return _place(rank, members), TreePosition(back[0], tuple(back[1:]))


def _turned(rank: int, by: int, members: int) -> int:
    return -1 if rank < 0 else (rank + by) % members


def _mirrored(rank: int, members: int) -> int:
    return -1 if rank < 0 else members - 1 - rank


def _place(rank: int, members: int) -> TreePosition:
    """Return a position in the tree in which odd numbers are leaves and 0 is the root.

    The lowest set bit of a number is its height: its parent has the next higher one.
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
    """Return the members of a group: the largest divisor up to the square root."""
    return max(size for size in range(1, members + 1) if members % size == 0 and size**2 <= members)


def folded(members: int) -> int:
    """Return the largest power of two up to `members`: the size of a butterfly."""
    return 1 << (members.bit_length() - 1)


def halves(rank: int, active: int, elements: int) -> list[tuple[int, int, int]]:
    """Return the steps of a butterfly member: (partner, start, stop) of the half that it keeps.

    `active` is the size of the butterfly, a power of two.
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
    """Return the sizes of `parts` consecutive chunks that add up to `elements`; the last may be 0.

    Every chunk but the last non-empty one is a multiple of `block`, so that encoding a chunk uses
    the same blocks as encoding the whole. Chunks differ by at most one block.
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
