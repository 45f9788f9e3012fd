"""Bucketing: the means of random groups of contributions, given to a robust rule in their place.

Karimireddy, He, Jaggi 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing"
(https://arxiv.org/abs/2006.09365), Algorithm 1. Legend: n contributions, s in a bucket, F wrong.

    shuffle the contributions; cut them into ceil(n / s) buckets of s (the last may be smaller)
    y_b = mean of bucket b;  result = Rule(y_1 .. y_ceil(n/s))

Members that train on different data differ honestly, and a rule that looks for what most agree on
throws out whoever knows something of its own. The means of buckets differ s times less (in
variance), so the rule takes in more of them. The price: F wrong ones spoil up to F buckets of a
number that is s times smaller.

Differs from the paper: the order follows from the round and the name of the vector, so whoever
computes it (again) gets the same buckets, and so do several reducers with a part of the vector
each. It is no secret: wrong members can know beforehand with whom they will be.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.reducer.block_view import BlockView


def buckets_of(members: Sequence[str], *, size: int, seed: str) -> list[list[int]]:
    """Return who is together with whom, as places in `members`, whatever their order there.

    Args:
        members: Whose contributions these are.
        size: Contributions in one bucket; the last one may have fewer.
        seed: The same everywhere, another in every round.
    """
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big")
    places = sorted(range(len(members)), key=lambda place: members[place])
    random.Random(number).shuffle(places)
    return [places[start : start + size] for start in range(0, len(places), size)]


class Bucketed:
    """The means of buckets as rows of a matrix that is never whole in memory; see `BlockView`."""

    def __init__(self, rows: BlockView, buckets: Sequence[Sequence[int]]) -> None:
        """Look at rows, all of which MUST be in one bucket each."""
        self._rows, self._buckets = rows, [list(bucket) for bucket in buckets]
        self.num_elements = rows.num_elements

    def __len__(self) -> int:
        return len(self._buckets)

    def strips(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield where a strip is, and the buckets' means there: float32, (buckets, w)."""
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
        """Return what tells equal scores apart, the same in every order of the rows."""
        rows = self._rows.digests()
        return [
            hashlib.blake2b(b"".join(sorted(rows[place] for place in bucket))).digest()
            for bucket in self._buckets
        ]
