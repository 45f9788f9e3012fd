from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, GroupError, LossNotFinite, PeerLost
from atoll.reducer.block_view import BlockView, Sliceable
from atoll.reducer.combine import NormHistory, combine
from atoll.reducer.mean import Mean, Share, mean_of
from atoll.reducer.rules.distances import distances_from, squared_distances
from tests.tiers import examples

FP32 = make_codec("fp32")
RULES = [
    "median", "trimmed:1", "krum:1", "multi-krum:1", "multi-krum:1:2", "clip:0.5", "clip:2:4",
    "geometric-median",
]  # fmt: skip
SAME_AS_MEAN = ["trimmed:0", "multi-krum:0", "clip:inf", "mean"]
SIZES = [0, 1, 700, 70_001]


def vectors(n: int, size: int, *, seed: int = 0, offset: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [offset + torch.randn(size, generator=generator) for _ in range(n)]


def shares(
    xs: Sequence[Tensor], aggregation: str, *, codec: Codec = FP32, weights: Sequence[float] = ()
) -> list[Share]:
    chosen = list(weights) or [1.0] * len(xs)
    return [
        Share(f"w{i}", codec.encode(x), weight, aggregation=aggregation)
        for i, (x, weight) in enumerate(zip(xs, chosen, strict=True))
    ]


def combined(
    xs: Sequence[Tensor], aggregate: str, *, codec: Codec = FP32, weights: Sequence[float] = ()
) -> Mean:
    aggregation = f"{aggregate}/finite/x"
    given = shares(xs, aggregation, codec=codec, weights=weights)
    return combine(given, codec=codec, aggregation=aggregation, memory=NormHistory())


def decoded(mean: Mean) -> Tensor:
    return make_codec(mean.packet.codec).decode(mean.packet)


@pytest.mark.parametrize("size", SIZES)
def test_the_median_is_that_of_torch(size: int) -> None:
    for n in (1, 3, 5, 8):
        xs = vectors(n, size)
        ordered = torch.stack(xs).sort(0).values.double()
        expected = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
        torch.testing.assert_close(decoded(combined(xs, "median")).double(), expected)


@pytest.mark.parametrize(("n", "bad"), [(3, 1), (5, 1), (5, 2), (8, 3)])
def test_trimmed_mean_drops_extremes_by_coordinate(n: int, bad: int) -> None:
    xs = vectors(n, 50_000)
    expected = torch.stack(xs).double().sort(0).values[bad : n - bad].mean(0)
    torch.testing.assert_close(decoded(combined(xs, f"trimmed:{bad}")).double(), expected)


@pytest.mark.parametrize("codec", ["fp32", "int8", "bf16"])
def test_krum_takes_the_most_central_contribution(codec: str) -> None:
    coder = make_codec(codec)
    xs = [coder.decode(coder.encode(x)) for x in vectors(7, 40_000)]
    xs[6] = 100.0 + xs[6]
    stacked = torch.stack(xs).double()
    squares = (stacked.unsqueeze(0) - stacked.unsqueeze(1)).square().sum(2)
    scores = squares.sort(1).values[:, 1 : 7 - 2 - 2 + 1].sum(1)
    best = scores.argsort()
    found = decoded(combined(xs, "krum:2", codec=coder))
    torch.testing.assert_close(found, xs[int(best[0])], rtol=0.02, atol=0.02)
    several = decoded(combined(xs, "multi-krum:2:3", codec=coder)).double()
    torch.testing.assert_close(several, stacked[best[:3]].mean(0), rtol=0.02, atol=0.03)


def test_clipping_follows_the_formula_from_the_last_aggregate() -> None:
    aggregation, memory = "clip:3:2/finite/x", NormHistory()
    start = torch.zeros(1000, dtype=torch.float64)
    for round_ in range(3):
        xs = vectors(4, 1000, seed=round_, offset=0.2)
        found = combine(
            shares(xs, aggregation),
            codec=FP32,
            aggregation=aggregation,
            memory=memory,
            round_=round_,
        )
        for _ in range(2):
            pulls = [x.double() - start for x in xs]
            start = start + sum(p * min(1.0, 3 / float(p.norm())) for p in pulls) / 4
        torch.testing.assert_close(decoded(found).double(), start, rtol=1e-5, atol=1e-6)


def test_an_attempt_that_was_not_committed_leaves_no_trace() -> None:
    aggregation, memory = "clip:1/finite/x", NormHistory()
    first, other = vectors(3, 100), vectors(3, 100, seed=9, offset=-5.0)

    def at(xs: list[Tensor], round_: int) -> Tensor:
        given = shares(xs, aggregation)
        return decoded(
            combine(given, codec=FP32, aggregation=aggregation, memory=memory, round_=round_)
        )

    once = at(first, 0)
    assert torch.equal(at(other, 0), decoded(combined(other, "clip:1")))
    assert torch.equal(at(first, 0), once)
    assert not torch.equal(at(first, 1), once)


def test_the_geometric_median_minimises_the_sum_of_distances() -> None:
    xs = vectors(5, 300)
    xs[0] = xs[0] * 50
    found = decoded(combined(xs, "geometric-median")).double()
    stacked = torch.stack(xs).double()

    def total(point: Tensor) -> float:
        return float((stacked - point).norm(dim=1).sum())

    for direction in torch.eye(300, dtype=torch.float64)[:20]:
        for sign in (-0.05, 0.05):
            assert total(found) < total(found + sign * direction)
    assert total(found) < min(total(x.double()) for x in xs)


def test_geometric_median_of_a_repeated_point_is_it() -> None:
    xs = [torch.full((10,), 2.5)] * 4
    assert torch.equal(decoded(combined(xs, "geometric-median")), xs[0])


@pytest.mark.parametrize("aggregate", SAME_AS_MEAN)
@pytest.mark.parametrize("size", SIZES)
def test_rules_against_nobody_are_the_mean(aggregate: str, size: int) -> None:
    xs = vectors(5, size)
    mean = decoded(mean_of(shares(xs, ""), codec=FP32))
    torch.testing.assert_close(decoded(combined(xs, aggregate)), mean, rtol=1e-5, atol=1e-6)


def test_a_sum_is_the_mean_times_the_members_that_have_weight() -> None:
    xs = vectors(3, 99)
    found = combined(xs, "sum", weights=[1.0, 1.0, 0.0])
    torch.testing.assert_close(decoded(found), xs[0] + xs[1])
    assert found.contributors == ("w0", "w1", "w2")


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from(RULES), st.integers(5, 8), st.integers(0, 2000),
    st.permutations(range(8)), st.integers(0, 2**20),
)  # fmt: skip
def test_who_sent_what_does_not_matter(
    aggregate: str, n: int, size: int, order: list[int], seed: int
) -> None:
    xs = vectors(n, size, seed=seed)
    straight = decoded(combined(xs, aggregate))
    mixed = decoded(combined([xs[i] for i in order if i < n], aggregate))
    torch.testing.assert_close(mixed, straight, rtol=1e-5, atol=1e-6)
    if aggregate.startswith(("median", "trimmed", "krum")):
        assert torch.equal(mixed, straight)


@pytest.mark.parametrize("aggregate", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, -3e38])
def test_one_that_is_wrong_moves_the_result_little(aggregate: str, bad: float) -> None:
    xs = vectors(6, 3000)
    honest = torch.stack(xs[:5]).mean(0)
    xs[5] = torch.full((3000,), bad)
    found = combined(xs, aggregate)
    far = max(float((x - honest).norm()) for x in xs[:5])
    if aggregate.startswith("clip"):
        honest = torch.zeros(3000)  # where it starts from
    assert float((decoded(found) - honest).norm()) <= 1.2 * far
    if not math.isfinite(bad):
        assert isinstance(found.left_out["w5"], LossNotFinite)
        assert "w5" not in found.contributors


@pytest.mark.parametrize("codec", ["int8", "randomk:0.5"])
def test_a_packet_that_cannot_be_decoded_is_left_out_alone(codec: str) -> None:
    coder, aggregation = make_codec(codec), "median/finite/x"
    coder.set_round(0)
    given = shares(vectors(4, 600), aggregation, codec=coder)
    broken = replace(given[1].packet, data=bytes(given[1].packet.data)[:-8])
    given[1] = replace(given[1], packet=broken)
    found = combine(given, codec=coder, aggregation=aggregation)
    assert found.contributors == ("w0", "w2", "w3")
    assert set(found.left_out) == {"w1"}


@pytest.mark.parametrize("aggregate", RULES)
def test_leaving_one_of_n_out_equals_a_run_of_the_others(aggregate: str) -> None:
    xs = vectors(7, 500)
    poisoned = [*xs[:3], torch.full((500,), math.nan), *xs[3:]]
    with_it, without = combined(poisoned, aggregate), combined(xs, aggregate)
    assert bytes(with_it.packet.data) == bytes(without.packet.data)


@pytest.mark.parametrize("aggregate", RULES)
def test_members_of_weight_zero_take_no_part(aggregate: str) -> None:
    xs = vectors(6, 400)
    found = combined([*xs, torch.full((400,), 9e9)], aggregate, weights=[1.0] * 6 + [0.0])
    assert bytes(found.packet.data) == bytes(combined(xs, aggregate).packet.data)
    assert found.contributors == tuple(f"w{i}" for i in range(7))
    assert found.weight == 6.0
    with pytest.raises(GroupError, match="nothing to average"):
        combined(xs, aggregate, weights=[0.0] * 6)


def test_heavy_weights_buy_nothing() -> None:
    xs = vectors(5, 100)
    for aggregate in RULES:
        light, heavy = combined(xs, aggregate), combined(xs, aggregate, weights=[1e9, 1, 1, 1, 1])
        assert bytes(light.packet.data) == bytes(heavy.packet.data)


@pytest.mark.parametrize(
    ("aggregate", "n", "nearest"),
    [
        ("krum:1", 4, "krum:0 works with 4"), ("krum:2", 6, "krum:1 works with 6"),
        ("krum:0", 2, "median works with 2"), ("trimmed:2", 4, "trimmed:1 works with 4"),
        ("multi-krum:1:5", 5, "multi-krum:1 works with 5"),
    ],
)  # fmt: skip
def test_too_few_are_an_error_that_names_what_works(aggregate: str, n: int, nearest: str) -> None:
    with pytest.raises(PeerLost, match=nearest):
        combined(vectors(n, 10), aggregate)
    combined(vectors(n, 10), nearest.split()[0])


def test_those_found_out_are_no_longer_among_the_wrong_ones() -> None:
    xs = vectors(7, 50)
    xs[6] = torch.full((50,), math.nan)
    assert combined(xs, "krum:2").contributors == tuple(f"w{i}" for i in range(6))
    with pytest.raises(PeerLost):
        combined(xs[:6], "krum:2")


@pytest.mark.parametrize("aggregation", ["clip:1/finite/x", "mean/norms/x"])
def test_what_remembers_needs_a_memory(aggregation: str) -> None:
    with pytest.raises(GroupError, match="needs the reducer"):
        combine(shares(vectors(3, 5), aggregation), codec=FP32, aggregation=aggregation)


def test_an_aggregation_that_is_none_is_refused() -> None:
    for aggregation in ("median", "x" * 500, "medium/finite/x", "median/finit/x"):
        with pytest.raises(ConfigError):
            combine(
                shares(vectors(3, 5), aggregation),
                codec=FP32,
                aggregation=aggregation,
                memory=NormHistory(),
            )


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_strips_are_parts_of_the_decoded_rows(codec: str) -> None:
    coder = make_codec(codec)
    assert isinstance(coder.base, Sliceable)
    given = shares(vectors(3, 70_001), "", codec=coder)
    whole = torch.stack([coder.decode(share.packet) for share in given])
    scale = torch.tensor([[1.0], [0.5], [2.0]])
    rows = BlockView(given, coder, scales=[1.0, 0.5, 2.0])
    seen = torch.zeros(3, 70_001)
    for where, strip in rows.strips():
        seen[:, where] = strip
    assert torch.equal(seen, whole * scale)
    norms = torch.tensor(rows.norms(), dtype=torch.float64)
    torch.testing.assert_close(norms, (whole * scale).double().norm(dim=1))
    sums = (whole * scale * torch.tensor([[1.0], [0.0], [-2.0]])).sum(0)
    torch.testing.assert_close(rows.combination([1.0, 0.0, -2.0]), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp16", "fp8", "int8", "sigma8", "int4", "e3m0", "sign"])
def test_rules_look_at_what_codecs_decode_to(codec: str) -> None:
    coder = make_codec(codec)
    xs = vectors(5, 3000)
    rows = torch.stack([coder.decode(coder.encode(x)) for x in xs])
    expected = coder.base.encode(rows.sort(0).values[2].clone())
    found = combined(xs, "median", codec=coder)
    assert bytes(found.packet.data) == bytes(expected.data)


def test_distances_are_those_of_double_precision() -> None:
    xs = [1e4 + x for x in vectors(4, 40_000)]
    found = torch.tensor(squared_distances(BlockView(shares(xs, ""), FP32)))
    stacked = torch.stack(xs).double()
    expected = (stacked.unsqueeze(0) - stacked.unsqueeze(1)).square().sum(2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)
    factors = [0.1, 0.2, 0.3, 0.4]
    mean = sum(f * x for f, x in zip(factors, stacked, strict=True))
    away = torch.tensor(distances_from(expected.tolist(), factors), dtype=torch.float64)
    torch.testing.assert_close(away, (stacked - mean).norm(dim=1), rtol=1e-6, atol=1e-6)
