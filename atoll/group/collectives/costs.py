"""Costs of collectives: exact bytes per member, and a model of the time; without torch.

Legend: n members, S bytes of the vector, a latency of one message, B bytes per second of a link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.errors import unknown
from atoll.group.aggregation import COLLECTIVES
from atoll.group.collectives.topology import folded, group_size, halves, partition, tree_positions

WIDTH = 4
"""Bytes of an element in partial sums."""
WEIGHT_BYTES = 8
"""Bytes of the weight before an encoded vector."""


def moved_bytes(collective: str, *, rank: int, members: int, elements: int) -> tuple[int, int]:
    """Return the bytes that a member sends and receives to all-reduce fp32 vectors.

    `elements` includes the ones added by :func:`wire_elements`. Raises ConfigError if the
    collective is unknown.
    """
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES)
    if members == 1:
        return 0, 0
    if collective == "auto":
        both = round(2 * (members - 1) / members * WIDTH * elements)
        return both, both
    if collective == "star":
        count = members - 1 if rank == 0 else 1
        return count * WIDTH * elements, count * WIDTH * elements
    if collective == "tree":
        return _tree(rank, members, elements)
    if collective == "butterfly":
        both = _butterfly(rank, members, elements)
        return both, both
    return _rings(rank, members, elements, size=members if collective == "ring" else 0)


def wire_elements(elements: int, members: int) -> int:
    """Return the length of a vector on the wire, with every member's weight and usability."""
    return elements + 2 * members


def star_bytes(up: int, down: int, *, rank: int, members: int) -> tuple[int, int]:
    """Return the bytes that a member of a star sends and receives.

    `up` are the bytes of an encoded contribution, `down` of the encoded result; rank 0 is the
    centre.
    """
    up, down = up + WEIGHT_BYTES, down + WEIGHT_BYTES * members
    if rank:
        return up, down
    return (members - 1) * down, (members - 1) * up


def _rings(rank: int, members: int, elements: int, *, size: int) -> tuple[int, int]:
    """Return the bytes of one ring (`size` is n), or of rings inside and between groups."""
    size = size or group_size(members)
    chunks = partition(elements, size)
    sent, received = _ring(rank % size, chunks)
    pieces = partition(chunks[(rank % size + 1) % size], members // size)
    more_sent, more_received = _ring(rank // size, pieces)
    return WIDTH * (sent + more_sent), WIDTH * (received + more_received)


def _ring(here: int, chunks: Sequence[int]) -> tuple[int, int]:
    """Return the elements sent and received by one member of a ring, in both phases."""
    n = len(chunks)
    steps = range(n - 1)
    sent = sum(chunks[(here - s) % n] + chunks[(here + 1 - s) % n] for s in steps)
    received = sum(chunks[(here - s - 1) % n] + chunks[(here - s) % n] for s in steps)
    return sent, received


def _tree(rank: int, members: int, elements: int) -> tuple[int, int]:
    moved = 0
    for place, half in zip(tree_positions(rank, members), partition(elements, 2), strict=True):
        moved += half * ((place.parent >= 0) + len(place.children))
    return WIDTH * moved, WIDTH * moved


def _butterfly(rank: int, members: int, elements: int) -> int:
    """Return the bytes sent, which equal those received."""
    active = folded(members)
    extra = elements if rank >= active or rank + active < members else 0
    if rank >= active:
        return WIDTH * extra
    outer, moved = elements, 0
    for _, start, stop in halves(rank, active, elements):
        moved += outer  # one part is sent while halving, the other while doubling
        outer = stop - start
    return WIDTH * (extra + moved)


def seconds(
    collective: str, *, members: int, nbytes: float, latency_s: float, bytes_per_s: float
) -> float:
    """Return the duration in the latency-bandwidth model with equal links; raises ConfigError."""
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES)
    n, whole = members, nbytes / bytes_per_s
    if n == 1:
        return 0.0
    if collective == "star":
        return 2 * latency_s + 2 * (n - 1) * whole
    if collective == "tree":
        return 2 * math.ceil(math.log2(n)) * latency_s + 2 * whole
    if collective == "butterfly":
        active = folded(n)
        fold = 0.0 if active == n else 2 * latency_s + 2 * whole
        return fold + 2 * math.log2(active) * latency_s + 2 * (active - 1) / active * whole
    size = group_size(n) if collective == "hierarchical" else n
    return _ring_s(size, whole, latency_s) + _ring_s(n // size, whole / size, latency_s)


def _ring_s(members: int, whole_s: float, latency_s: float) -> float:
    return 2 * (members - 1) * latency_s + 2 * (members - 1) / members * whole_s
