"""Sum all-reduces by name: ring, butterfly, tree, hierarchical.

Each replaces a vector by the sum over all members, in place. Every element of the sum is computed
on one member, in an order that depends only on the number and the order of the members, and copied
from there, so all members have the same bits. Partial sums are sent, so the values must not be
rounded: fp32.
Legend: n members, S bytes of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from atoll.group.collectives.bounded_process_group import BoundedProcessGroup
from atoll.group.collectives.topology import folded, group_size, halves, partition, tree_positions

SEGMENT = 65_536
"""Elements per pipelined segment of a tree."""
RING_SEGMENT = 262_144
"""Elements per pipelined segment of a ring: 1 MiB, so that the overhead per segment is small."""
AHEAD = 4
"""Segments of a ring that may be received before they are added."""


def ring(wires: BoundedProcessGroup, vector: Tensor) -> None:
    """Reduce-scatter and all-gather on a ring: each member sends 2 (n - 1) / n S.

    Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    Chunks go in segments: one is added, and sent on, while the next ones are received, so that the
    network waits neither for additions nor between steps and phases.
    """
    n, here = len(wires.members), wires.rank
    if n == 1:
        return
    right, left = (here + 1) % n, (here - 1) % n
    chunks = [
        torch.split(chunk, RING_SEGMENT) for chunk in torch.split(vector, partition(len(vector), n))
    ]
    steps = 2 * (n - 1)
    # What is received in step s is sent on in step s + 1. The first n - 1 steps add.
    gets = [(s, segment) for s in range(steps) for segment in chunks[(here - s - 1) % n]]
    scratch = torch.empty(AHEAD, min(RING_SEGMENT, len(vector)))
    places = [
        scratch[i % AHEAD][: len(segment)] if s < n - 1 else segment
        for i, (s, segment) in enumerate(gets)
    ]
    sent = [wires.send(segment, right) for segment in chunks[here]]
    under_way = [wires.receive(place, left) for place in places[:AHEAD]]
    for i, (s, segment) in enumerate(gets):
        wires.end(under_way[i])
        if s < n - 1:
            segment.add_(places[i])
        if s + 1 < steps:
            sent.append(wires.send(segment, right))
        # Its place is free now. A final segment comes only after its partial sum has been sent.
        if i + AHEAD < len(gets):
            under_way.append(wires.receive(places[i + AHEAD], left))
    wires.end(*sent)


def hierarchical(wires: BoundedProcessGroup, vector: Tensor) -> None:
    """Reduce-scatter inside groups of neighbours, all-reduce between groups, all-gather inside.

    With m groups of g members each sends 2 (m - 1) / m S / g to other groups and 2 (g - 1) / g S
    inside its own. Members are neighbours by their order; g is the largest divisor of n up to its
    square root, so that a prime number of members is one ring.
    """
    n, rank = len(wires.members), wires.rank
    size = group_size(n)
    inside = range(rank - rank % size, rank - rank % size + size)
    across = range(rank % size, n, size)
    chunks = torch.split(vector, partition(len(vector), size))
    _reduce_scatter(wires, inside, chunks)
    mine = chunks[(inside.index(rank) + 1) % size]
    pieces = torch.split(mine, partition(len(mine), len(across)))
    _reduce_scatter(wires, across, pieces)
    _all_gather(wires, across, pieces)
    _all_gather(wires, inside, chunks)


def _reduce_scatter(
    wires: BoundedProcessGroup, members: Sequence[int], chunks: Sequence[Tensor]
) -> None:
    """Reduce-scatter on a ring; afterwards the chunk after the own number is complete."""
    n, here = len(members), members.index(wires.rank)
    right, left = members[(here + 1) % n], members[(here - 1) % n]
    scratch = torch.empty(max(map(len, chunks)))
    for step in range(n - 1):
        give, get = chunks[(here - step) % n], chunks[(here - step - 1) % n]
        part = scratch[: len(get)]
        wires.end(wires.send(give, right), wires.receive(part, left))
        get.add_(part)


def _all_gather(
    wires: BoundedProcessGroup, members: Sequence[int], chunks: Sequence[Tensor]
) -> None:
    """All-gather on a ring, starting with the chunk after the own number."""
    n, here = len(members), members.index(wires.rank)
    right, left = members[(here + 1) % n], members[(here - 1) % n]
    for step in range(n - 1):
        give, get = chunks[(here + 1 - step) % n], chunks[(here - step) % n]
        wires.end(wires.send(give, right), wires.receive(get, left))


def butterfly(wires: BoundedProcessGroup, vector: Tensor) -> None:
    """Recursive halving and doubling.

    Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in
    MPICH", section 4.4. If n is not a power of two, the last members first send their values to a
    partner and receive the sum from it at the end.
    """
    n, rank = len(wires.members), wires.rank
    active = folded(n)
    if rank >= active:
        wires.end(wires.send(vector, rank - active))
        wires.end(wires.receive(vector, rank - active))
        return
    scratch = torch.empty(len(vector))
    if rank + active < n:
        wires.end(wires.receive(scratch, rank + active))
        vector.add_(scratch)
    outer = (0, len(vector))
    steps = []
    for partner, start, stop in halves(rank, active, len(vector)):
        give = vector[stop : outer[1]] if start == outer[0] else vector[outer[0] : start]
        part = scratch[: stop - start]
        wires.end(wires.send(give, partner), wires.receive(part, partner))
        vector[start:stop].add_(part)
        steps.append((partner, vector[start:stop], give))
        outer = (start, stop)
    for partner, mine, theirs in reversed(steps):
        wires.end(wires.send(mine, partner), wires.receive(theirs, partner))
    if rank + active < n:
        wires.end(wires.send(vector, rank + active))


def tree(wires: BoundedProcessGroup, vector: Tensor) -> None:
    """Reduce up and broadcast down two binary trees, each with half of the vector, in segments.

    See :func:`tree_positions`.
    """
    places = tree_positions(wires.rank, len(wires.members))
    parts = [torch.split(half, SEGMENT) for half in torch.split(vector, partition(len(vector), 2))]
    # Alternate between the trees per segment: members then wait only for earlier segments.
    jobs = [
        (places[which], parts[which][index])
        for index in range(max(map(len, parts)))
        for which in (0, 1)
        if index < len(parts[which])
    ]
    scratch = torch.empty(min(SEGMENT, len(vector)))
    under_way = []
    for place, segment in jobs:
        for child in place.children:
            part = scratch[: len(segment)]
            wires.end(wires.receive(part, child))
            segment.add_(part)
        if place.parent >= 0:
            under_way.append(wires.send(segment, place.parent))
    wires.end(*under_way)
    under_way.clear()
    for place, segment in jobs:
        if place.parent >= 0:
            wires.end(wires.receive(segment, place.parent))
        under_way.extend(wires.send(segment, child) for child in place.children)
    wires.end(*under_way)


SUMS: Mapping[str, Callable[[BoundedProcessGroup, Tensor], None]] = MappingProxyType(
    {"ring": ring, "butterfly": butterfly, "tree": tree, "hierarchical": hierarchical}
)
