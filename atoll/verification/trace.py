"""What is compared: the digests of a member-round, and the first step at which two of them differ.

A member-round is the work of one member in one round: from the committed state it takes its steps
to a new state, whose difference is the contribution, which is encoded as a packet. Every part is a
pure function of the one before. So two digests of the same step are equal unless one of the two
computed something else, or with another arithmetic (processor type, library versions).

The hub compares digests only, so nothing here needs torch.

Verde (Arun et al. 2025, https://arxiv.org/abs/2502.19405) compares in the same order: digests at
marked steps first, then at every step between two marks.

Differs from the paper:
  * all marks are sent with the contribution instead of a Merkle root: they are few;
  * the search ends at one optimizer step, which the judge computes, not at one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.digest import Digest

EMPTY = b"[]\n"
"""The own part of a member that has taken no step: it has no tensors."""

FRESH = Digest(EMPTY).hexdigest()
"""Digest of the own part of a member that has taken no step."""

MARKS = 4
"""Marked steps per member-round: each costs one pass over the state, and shortens a dispute."""


def mark_positions(steps: int, *, marks: int = MARKS) -> tuple[int, ...]:
    """Return the steps of a period after which its state is digested; the last one is `steps`."""
    return tuple(sorted({steps * i // marks for i in range(1, marks + 1)} - {0}))


def state_digest(model: str, own: str) -> str:
    """Return the digest of a state from those of its model and of its own part."""
    return Digest(f"{model} {own}".encode()).hexdigest()


def planned_steps(length: int, pace: float) -> int:
    """Return the optimizer steps of a member in a period; as `Task.begin_period` plans them."""
    return max(1, round(length * pace))


def first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    """Return an index at which two lists differ after an index at which they agree, by bisection.

    Raises:
        ValueError: they are not of one length, differ at the start, or agree at the end: then
            there is nothing to search.
    """
    if len(one) != len(other) or len(one) < 2 or one[0] != other[0] or one[-1] == other[-1]:
        raise ValueError("a dispute agrees at its start and differs at its end")
    agreed, differs = 0, len(one) - 1
    while differs - agreed > 1:
        middle = (agreed + differs) // 2
        if one[middle] == other[middle]:
            agreed = middle
        else:
            differs = middle
    return differs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a member-round ends in."""

    closing: str
    """Digest of the member's own part after the last step: with it the next round opens."""
    contribution: str
    packet: str
    """Digest of the encoded contribution and its weight; empty: unknown."""

    def agrees(self, other: Outcome) -> bool:
        """Return whether two outcomes are the same; a packet that is not known is not compared."""
        packets = self.packet == other.packet or not (self.packet and other.packet)
        return packets and (self.closing, self.contribution) == (other.closing, other.contribution)


def packet_digest(codec: str, weight: float, data: bytes | bytearray | memoryview) -> str:
    """Return the digest of an encoded contribution and its weight."""
    found = Digest(f"{codec} {weight!r}\n".encode())
    found.update(data)
    return found.hexdigest()
