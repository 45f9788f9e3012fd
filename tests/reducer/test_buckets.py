"""Bucketing: who is with whom, what comes out, and what it is worth where members differ."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, PeerLost
from atoll.group.aggregation import Aggregation
from atoll.reducer.aggregation import members_needed, parse_aggregate
from atoll.reducer.buckets import buckets_of
from atoll.reducer.combine import NormHistory, averaged, combine
from atoll.reducer.mean import Share

FP32 = make_codec("fp32")
ROBUST = ["median", "trimmed:1", "krum:1", "multi-krum:1", "clip:0.5", "geometric-median"]


def shares(xs: list[Tensor], aggregate: str) -> list[Share]:
    aggregation = f"{aggregate}/finite/delta"
    return [Share(f"w{i}", FP32.encode(x), 1.0, aggregation=aggregation) for i, x in enumerate(xs)]


def result(xs: list[Tensor], aggregate: str, *, round_: int = 0) -> Tensor:
    aggregation = f"{aggregate}/finite/delta"
    found = averaged(
        shares(xs, aggregate),
        codec=FP32,
        aggregation=aggregation,
        memory=NormHistory(),
        round_=round_,
    )
    return found.vector


def vectors(n: int, size: int = 300) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(size, generator=generator) for _ in range(n)]


# ------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "spec", "needed"),
    [
        ("bucket:2:krum:1", "bucket:2:krum:1", 9),
        (" bucket : 3 : trimmed : 1 ", "bucket:3:trimmed:1", 7),
        ("bucket:2:clip:0.5:3", "bucket:2:clip:0.5:3", 1),
        ("bucket:1:median", "median", 1),
    ],
)
def test_a_rule_in_buckets_has_one_canonical_form(text: str, spec: str, needed: int) -> None:
    rule = parse_aggregate(text)
    assert rule.spec == spec
    assert parse_aggregate(rule.spec) == rule
    assert members_needed(rule) == needed  # ceil(n / S) buckets are enough for the rule


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("bucket", "not a robust rule in buckets"), ("bucket:2", "not a robust rule in buckets"),
        ("bucket:0:median", "not a robust rule in buckets"),
        ("bucket:x:median", "not a robust rule in buckets"),
        ("bucket:2:mean", "the same with and without"),
        ("bucket:2:krumm:1", "did you mean 'krum'"), ("bucket:2:bucket:2:krum:1", "unknown"),
    ],
)  # fmt: skip
def test_buckets_of_nothing_sensible_are_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        Aggregation(aggregate=text)


def test_buckets_need_the_place_that_sees_all_contributions() -> None:
    assert not Aggregation(aggregate="median").needs_reducer
    assert Aggregation(aggregate="bucket:2:median").needs_reducer


def test_too_few_for_the_rule_in_buckets_are_told_so() -> None:
    with pytest.raises(PeerLost, match="at least 9"):
        result(vectors(8), "bucket:2:krum:1")
    result(vectors(9), "bucket:2:krum:1")


# ------------------------------------------------------------------------ who with whom


@given(n=st.integers(1, 40), size=st.integers(1, 6), round_=st.integers(0, 99))
def test_everybody_is_in_one_bucket_whoever_asks(n: int, size: int, round_: int) -> None:
    names = [f"w{i}" for i in range(n)]
    buckets = buckets_of(names, size=size, seed=f"{round_}/delta")
    assert sorted(place for bucket in buckets for place in bucket) == list(range(n))
    assert [len(bucket) for bucket in buckets[:-1]] == [size] * (len(buckets) - 1)
    other = random.Random(round_).sample(names, n)
    again = buckets_of(other, size=size, seed=f"{round_}/delta")
    assert [[other[p] for p in b] for b in again] == [[names[p] for p in b] for b in buckets]


def test_every_round_and_every_vector_has_buckets_of_its_own() -> None:
    names = [f"w{i}" for i in range(12)]
    found = {
        str(buckets_of(names, size=2, seed=f"{round_}/{key}"))
        for round_ in range(20) for key in ("delta", "other")
    }  # fmt: skip
    assert len(found) == 40


# ----------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("rule", ROBUST)
def test_a_rule_in_buckets_is_the_rule_of_their_means(rule: str) -> None:
    """Also with a last bucket that is smaller."""
    xs = vectors(11)
    groups = buckets_of([f"w{i}" for i in range(11)], size=2, seed="5/delta")
    means = [torch.stack([xs[place] for place in group]).mean(0) for group in groups]
    expected = result(means, rule, round_=5)
    assert torch.allclose(result(xs, f"bucket:2:{rule}", round_=5), expected, atol=1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_buckets_of_one_are_the_rule_to_the_bit(rule: str) -> None:
    xs = vectors(7)
    assert torch.equal(result(xs, f"bucket:1:{rule}"), result(xs, rule))


@pytest.mark.parametrize("rule", ROBUST)
def test_result_bits_do_not_depend_on_arrival_order(rule: str) -> None:
    given = shares(vectors(9), f"bucket:2:{rule}")
    aggregation = f"bucket:2:{rule}/finite/delta"
    first = combine(given, codec=FP32, aggregation=aggregation, memory=NormHistory(), round_=3)
    again = combine(given, codec=FP32, aggregation=aggregation, memory=NormHistory(), round_=3)
    assert first.packet.data == again.packet.data
    turned = combine(
        given[::-1], codec=FP32, aggregation=aggregation, memory=NormHistory(), round_=3
    )
    values = FP32.decode(first.packet), FP32.decode(turned.packet)
    assert torch.allclose(*values, atol=1e-6)


# ---------------------------------------------------------------------- what it is worth

HONEST, ROUNDS, RATE = 14, 100, 0.1


def distance(aggregate: str) -> float:
    """Return how far from the honest optimum a descent ends, in units of that optimum's length.

    Every honest member has a target of its own; each coordinate is exponentially distributed, as
    where few members know much of something: the optimum of all is the mean of their targets. The
    liar always wants to go the other way.
    """
    generator = torch.Generator().manual_seed(2)
    targets = -torch.rand(HONEST, 40, generator=generator).log()
    best, place, late = targets.mean(0), torch.zeros(40), torch.zeros(40)
    for round_ in range(ROUNDS):
        xs = [place - target for target in targets] + [torch.full((40,), 10.0)]
        place = place - RATE * result(xs, aggregate, round_=round_)
        if round_ >= ROUNDS // 2:
            late += place / (ROUNDS - ROUNDS // 2)
    return float((late - best).norm() / best.norm())


@pytest.mark.parametrize("rule", ["median", "krum:1"])
def test_honest_members_that_differ_are_heard_beside_a_liar(rule: str) -> None:
    """Without buckets these rules take what few of them know for a lie."""
    assert distance(f"bucket:2:{rule}") < 0.7 * distance(rule)


@pytest.mark.parametrize("rule", ["median", "krum:1", "trimmed:1", "geometric-median"])
def test_no_rule_in_buckets_believes_the_liar_as_a_mean_does(rule: str) -> None:
    assert distance(f"bucket:2:{rule}") < 0.5 * distance("mean")
