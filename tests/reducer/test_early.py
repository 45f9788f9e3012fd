"""Pieces of a mean that go out before the whole is known: the same bits, and when they count."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec.layout import last_bytes
from atoll.codec.registry import make_codec
from atoll.reducer.assembly import Assembly
from atoll.reducer.early import EarlyMean
from atoll.reducer.mean import Mean, Share, mean_of
from atoll.wire.chunks import ChunkHead, count_pieces
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import RoundPlan

CODECS = ("fp32", "bf16", "fp16", "int8:256", "int8:1000", "sigma8")
MEMBERS = ("w0", "w1", "w2")


def plan_of(**more: Any) -> RoundPlan:
    plan = RoundPlan(
        job="job", epoch=4, round=2, members=list(MEMBERS), route="relay", reducer="job/reducer",
        timeout_s=10.0,
    )  # fmt: skip
    return msgspec.structs.replace(plan, **more)


def shares_of(codec: str, elements: int, *, seed: int, weights: tuple[float, ...]) -> list[Share]:
    chance = torch.Generator().manual_seed(seed)
    coder = make_codec(codec)
    return [
        Share(name, coder.encode(torch.randn(elements, generator=chance)), weight)
        for name, weight in zip(MEMBERS, weights, strict=True)
    ]


def head_of(share: Share, index: int) -> ChunkHead:
    total = len(share.packet.data)
    return ChunkHead(
        kind="contribute", epoch=4, round=2, index=index, count=count_pieces(total),
        total_bytes=total, codec=share.packet.codec, sizes=list(share.packet.sizes),
        weight=share.weight, aggregation=share.aggregation,
    )  # fmt: skip


def piece_of(data: Any, index: int) -> memoryview:
    return memoryview(data)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class Exchange:
    """A reducer's view of one exchange, fed piece by piece."""

    def __init__(self, shares: list[Share], plan: RoundPlan | None = None) -> None:
        self.shares = shares
        self.assembly = Assembly(MEMBERS)
        self.early = EarlyMean(plan or plan_of(), self.assembly)
        self.sent: dict[int, bytes] = {}

    def feed(self, share: Share, index: int) -> None:
        self.assembly.add(share.member, head_of(share, index), piece_of(share.packet.data, index))
        if self.assembly.missing and self.early.arrived():
            for new in self.early.pieces():
                assert new not in self.sent
                self.sent[new] = bytes(piece_of(self.early.mean().packet.data, new))

    def feed_all(self, *, but: int = 0) -> None:
        """Feed every member's pieces in turns, without the last ones."""
        for index in range(count_pieces(len(self.shares[0].packet.data)) - but):
            for share in self.shares:
                self.feed(share, index)

    def whole(self) -> Mean | None:
        return self.early.whole(self.assembly.shares())


@pytest.mark.parametrize("codec", CODECS)
@given(
    elements=st.integers(140_000, 400_000), seed=st.integers(0, 999),
    weights=st.sampled_from([(1.0, 1.0, 1.0), (3.0, 1.0, 2.5)]),
)  # fmt: skip
@settings(max_examples=5, deadline=None)
def test_early_pieces_are_those_of_the_mean_bit_for_bit(
    codec: str, elements: int, seed: int, weights: tuple[float, ...]
) -> None:
    shares = shares_of(codec, elements, seed=seed, weights=weights)
    exchange, chance = Exchange(shares), random.Random(seed)
    left = {share.member: list(range(count_pieces(len(share.packet.data)))) for share in shares}
    if seed % 2:  # lost on the way and sent again
        for indices in left.values():
            chance.shuffle(indices)
    while any(left.values()):
        share = chance.choice([share for share in shares if left[share.member]])
        exchange.feed(share, left[share.member].pop(0))
    expected = mean_of(shares, codec=make_codec(codec))
    found = exchange.whole()
    for index, piece in exchange.sent.items():
        assert piece == bytes(piece_of(expected.packet.data, index))
    if found is not None:
        assert bytes(found.packet.data) == bytes(expected.packet.data)
        assert (found.contributors, found.weight) == (expected.contributors, expected.weight)
        assert found.packet.sizes == expected.packet.sizes
    assert (found is None) == (not exchange.sent)
    assert len(exchange.sent) < len(left) * count_pieces(len(shares[0].packet.data))


@pytest.mark.parametrize("codec", CODECS)
def test_pieces_go_out_while_others_are_under_way(codec: str) -> None:
    shares = shares_of(codec, 1_200_000, seed=1, weights=(1.0, 1.0, 1.0))
    exchange = Exchange(shares)
    exchange.feed_all(but=1)
    count = count_pieces(len(shares[0].packet.data))
    last = last_bytes(codec, len(shares[0].packet.data), piece=CHUNK_BYTES)
    assert len(exchange.sent) == count - round(last / CHUNK_BYTES)
    exchange.feed_all()
    assert exchange.whole() is not None
    assert len(exchange.early.sent) < count  # so that a member gets a piece that says they count


def test_a_lost_member_makes_them_not_count() -> None:
    exchange = Exchange(shares_of("fp32", 400_000, seed=2, weights=(1.0, 1.0, 1.0)))
    exchange.feed_all(but=2)
    assert exchange.sent
    exchange.assembly.drop("w1")
    for share in (exchange.shares[0], exchange.shares[2]):
        for index in range(count_pieces(len(share.packet.data))):
            exchange.feed(share, index)
    assert exchange.whole() is None
    assert not exchange.early.sent


def test_pieces_that_come_again_do_not_stand_for_others() -> None:
    exchange = Exchange(shares_of("fp32", 400_000, seed=2, weights=(1.0, 1.0, 1.0)))
    first, second, third = exchange.shares
    exchange.feed(third, 3)  # its first pieces are under way
    for _ in range(2):
        for index in range(3):
            exchange.feed(first, index)
        exchange.assembly.drop("w0")
    for index in range(3):
        exchange.feed(second, index)
        exchange.feed(first, index)
    assert not exchange.sent
    exchange.feed(third, 0)
    assert set(exchange.sent) == {0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
def test_values_that_a_mean_may_leave_out_end_them(value: float) -> None:
    shares = shares_of("fp32", 400_000, seed=3, weights=(1.0, 1.0, 1.0))
    vector = make_codec("fp32").decode(shares[1].packet)
    vector[200_000] = value
    shares[1] = replace(shares[1], packet=make_codec("fp32").encode(vector))
    exchange = Exchange(shares)
    exchange.feed_all()
    assert len(exchange.sent) <= 200_000 * 4 // CHUNK_BYTES + 1
    assert exchange.whole() is None


@pytest.mark.parametrize(
    ("codec", "plan", "change"),
    [
        ("fp32", plan_of(verified=True), {}),
        ("fp32", plan_of(unweighted=["w0"]), {}),
        ("fp32", plan_of(), {"aggregation": "median"}),
        ("fp32", plan_of(), {"weight": 0.0}),
        ("int4", plan_of(), {}),
        ("topk:0.9", plan_of(), {}),
    ],
    ids=["verified", "unweighted", "rule", "no weight", "int4", "topk"],
)
def test_what_needs_whole_vectors_has_no_early_pieces(
    codec: str, plan: RoundPlan, change: dict[str, Any]
) -> None:
    shares = shares_of(codec, 900_000, seed=4, weights=(1.0, 1.0, 1.0))
    shares = [replace(share, **change) for share in shares]
    exchange = Exchange(shares, plan)
    exchange.feed_all()
    assert not exchange.sent
    assert exchange.whole() is None


def test_members_with_other_codecs_have_no_early_pieces() -> None:
    shares = shares_of("fp32", 400_000, seed=5, weights=(1.0, 1.0, 1.0))
    shares[2] = shares_of("bf16", 400_000, seed=5, weights=(1.0, 1.0, 1.0))[2]
    exchange = Exchange(shares)
    for share in shares:
        for index in range(count_pieces(len(share.packet.data))):
            exchange.feed(share, index)
    assert not exchange.sent
