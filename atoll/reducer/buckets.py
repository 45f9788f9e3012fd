"""Bucketing: apply a robust rule to the means of random groups of contributions.

Karimireddy, He, Jaggi 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing"
(https://arxiv.org/abs/2006.09365), Algorithm 1. Legend: n contributions, s in a bucket, F wrong.

  shuffle the contributions; cut them into ceil(n / s) buckets of s (the last may be smaller)
  y_b = mean of bucket b;  result = Rule(y_1 .. y_ceil(n/s))

Honest members with different data send different updates, which a robust rule would exclude. The
variance of bucket means is s times smaller, so the rule keeps more of them. The price: F wrong
contributions spoil up to F of s times fewer rows.

Differs from the paper: the order follows from the round and the name of the vector, so that
repeated attempts, and several reducers with a part of the vector each, use the same buckets.
Wrong members can therefore predict their bucket.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.digest import Digest
from atoll.reducer.block_view import BlockView


def buckets_of(members: Sequence[str], *, size: int, seed: str) -> list[list[int]]:
    """Return the buckets as indices into `members`; the order of `members` does not matter.

    `seed` MUST be equal everywhere and different in every round.
    """
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big")
    places = sorted(range(len(members)), key=lambda place: members[place])
    random.Random(number).shuffle(places)
    return [places[start : start + size] for start in range(0, len(places), size)]


class Bucketed:
    """The means of buckets as rows of a matrix, decoded like a `BlockView`."""

    def __init__(self, rows: BlockView, buckets: Sequence[Sequence[int]]) -> None:
        """View rows; each MUST be in exactly one bucket."""
        self._rows, self._buckets = rows, [list(bucket) for bucket in buckets]
        self.num_elements = rows.num_elements

    def __len__(self) -> int:
        return len(self._buckets)

    def strips(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the columns of a strip and the buckets' means: float32, (buckets, w)."""
        for where, strip in self._rows.strips():
            yield where, torch.stack([strip[bucket].mean(0) for bucket in self._buckets])

    def combination(self, factors: Sequence[float]) -> Tensor:
        """Return the sum of all means times a factor each, (P,)."""
        spread = [0.0] * len(self._rows)
        for bucket, factor in zip(self._buckets, factors, strict=True):
            for place in bucket:
                spread[place] = factor / len(bucket)
        return self._rows.combination(spread)

    def digests(self) -> list[bytes]:
        """Return digests of the buckets, independent of the order of the rows."""
        rows = self._rows.digests()
        return [
            Digest(b"".join(sorted(rows[place] for place in bucket))).digest()
            for bucket in self._buckets
        ]
