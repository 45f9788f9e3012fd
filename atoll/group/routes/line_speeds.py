"""Round trips and rates between the members of a process group, measured by all of them at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from atoll.group.collectives.bounded_process_group import BoundedProcessGroup

PINGS = 3
PARTS, PART_BYTES = 4, 128 * 1024
"""What is sent in each direction; the first half does not count, while TCP's window grows."""


def measure_lines(wires: BoundedProcessGroup) -> dict[str, tuple[float, float]]:
    """Return (round trip in s, bytes per s) from every other member to this one.

    Called by all members. They measure in pairs, each with one partner at a time, because all
    connections of a member share its line. Raises as `BoundedProcessGroup.end`.
    """
    return {
        wires.members[partner]: (_trip_s(wires, partner), _bytes_per_s(wires, partner))
        for partner in partners(wires.rank, len(wires.members))
    }


def partners(rank: int, members: int) -> Iterator[int]:
    """Yield one partner after the other, so that all members are in pairs at any time.

    The circle method of tournaments: in round k those meet whose numbers add up to k, modulo an odd
    number; a member paired with itself gets the last one instead, or has no partner.
    """
    even = members + members % 2
    odd = even - 1
    for turn in range(odd):
        if rank == odd:
            partner = turn * (even // 2) % odd
        else:
            partner = (turn - rank) % odd
            partner = odd if partner == rank else partner
        if partner < members:
            yield partner


def _trip_s(wires: BoundedProcessGroup, partner: int) -> float:
    """Return the shortest of some round trips; begins and ends at the same time on both sides."""
    note, back = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    wires.end(wires.send(note, partner), wires.receive(back, partner))
    durations = []
    for turn in range(2 * PINGS):
        if (wires.rank < partner) == (turn < PINGS):
            began = time.perf_counter()
            wires.end(wires.send(note, partner))
            wires.end(wires.receive(back, partner))
            durations.append(time.perf_counter() - began)
        else:
            wires.end(wires.receive(back, partner))
            wires.end(wires.send(note, partner))
    return min(durations)


def _bytes_per_s(wires: BoundedProcessGroup, partner: int) -> float:
    parts = torch.zeros(PARTS, PART_BYTES, dtype=torch.uint8)
    sent = [wires.send(part, partner) for part in torch.zeros_like(parts)]
    came = []
    for receiving in [wires.receive(part, partner) for part in parts]:
        wires.end(receiving)
        came.append(time.perf_counter())
    wires.end(*sent)
    counted = PARTS - PARTS // 2
    return counted * PART_BYTES / max(came[-1] - came[PARTS // 2 - 1], 1e-6)
