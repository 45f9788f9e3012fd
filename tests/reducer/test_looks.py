"""How contributions look beside each other: copies, old ones, flipped ones, and damaged ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.codec.base import Packet
from atoll.reducer.looks import Looks
from atoll.reducer.mean import Share
from atoll.verification.scores import odd_ones

SIZE = 300_000
"""More elements than are looked at."""


def contributions(round_: int, *, members: int = 5) -> list[Tensor]:
    """Return vectors that have a direction in common, as those of honest members have."""
    draw = torch.Generator().manual_seed(round_)
    common = torch.randn(SIZE, generator=draw)
    return [common + torch.randn(SIZE, generator=draw) for _ in range(members)]


def shares(vectors: list[Tensor], *, codec: str = "int8") -> list[Share]:
    encoder = make_codec(codec)
    return [Share(f"w{i}", encoder.encode(each), 1.0) for i, each in enumerate(vectors)]


@pytest.mark.parametrize("codec", ["int8", "fp16", "fp32"])
def test_honest_members_look_alike_enough_and_not_too_much(codec: str) -> None:
    looks = Looks(random.Random(1))
    for round_ in range(3):
        found = looks.of(shares(contributions(round_), codec=codec))
        assert odd_ones(found) == {}
        assert all(look.alike == pytest.approx(0.5, abs=0.02) for look in found.values())
        assert all(look.along > 0.5 for look in found.values())


def test_copies_old_flipped_and_small_ones_are_odd() -> None:
    looks = Looks(random.Random(1))
    before = contributions(1, members=9)
    looks.of(shares(before))
    now = contributions(2, members=9)
    now[1] = 1.5 * now[0]
    now[3] = before[3]
    now[5] = -now[5]
    now[7] = 0.2 * now[7]
    found = odd_ones(looks.of(shares(now)))
    assert found.keys() == {"w0", "w1", "w3", "w5", "w7"}  # who copied from whom, a check shows
    assert found["w3"] == found["w1"] == "it resembles another contribution"
    assert found["w5"] == "it points against the others"
    assert found["w7"] == "it is small"


def test_only_a_sample_is_looked_at_and_it_is_not_known() -> None:
    vectors = contributions(1, members=2)
    one, other = (Looks(random.Random(seed)).of(shares(vectors)) for seed in (1, 2))
    whole = float(torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0))
    assert one["w0"].alike == pytest.approx(whole, abs=0.02)
    assert one["w0"].alike != other["w0"].alike


def test_damaged_and_other_ones_are_left_to_the_sum() -> None:
    good = shares(contributions(1, members=3))
    broken = Packet(b"short", "int8", good[0].packet.sizes)
    odd = shares([torch.full((SIZE,), torch.nan)], codec="int8")[0]
    small = make_codec("int8").encode(torch.randn(7))
    found = Looks(random.Random(1)).of([
        *good, Share("w3", broken, 1.0), Share("w4", odd.packet, 1.0), Share("w5", small, 1.0),
        Share("w6", make_codec("fp16").encode(contributions(1)[0]), 1.0),
        Share("w7", Packet(b"", "no-such-codec", good[0].packet.sizes), 1.0),
    ])  # fmt: skip
    assert found.keys() == {"w0", "w1", "w2"}


def test_a_member_alone_and_an_empty_vector() -> None:
    looks = Looks(random.Random(1))
    (alone,) = looks.of(shares(contributions(1, members=1))).values()
    assert (alone.alike, alone.along) == (0.0, 0.0)
    assert looks.of(shares([torch.zeros(0)])) == {}
    nothing = looks.of(shares([torch.zeros(9), torch.zeros(9)]))
    assert [(look.norm, look.alike, look.along) for look in nothing.values()] == 2 * [(0, 0, 0)]
