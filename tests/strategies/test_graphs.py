"""The table of graphs: weights, spectral gaps, and what they do to a mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.strategies.graphs import GRAPHS, UNEVEN, mixing, neighbours, pairs, pushing, spectral_gap

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 25, 64]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("graph", sorted(GRAPHS.keys() - UNEVEN.keys()))
@pytest.mark.parametrize("round_", [0, 1, 5])
def test_rows_and_columns_add_up_to_one(graph: str, n: int, round_: int) -> None:
    weights = mixing(graph, n, round_=round_)
    one = torch.ones(n, dtype=torch.float64)
    torch.testing.assert_close(weights @ one, one, rtol=0, atol=1e-14)
    torch.testing.assert_close(one @ weights, one, rtol=0, atol=1e-14)
    assert (weights >= 0).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_columns_of_push_sum_add_up_to_one_and_mass_is_conserved(graph: str, n: int) -> None:
    weights = pushing(graph, n, round_=3)
    torch.testing.assert_close(weights.sum(0), torch.ones(n, dtype=torch.float64))
    expected = [len(senders) for senders in neighbours(graph, n, round_=3)]
    assert [int((row > 0).sum()) - 1 for row in weights] == expected


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16, 64])
def test_gap_of_the_ring(n: int) -> None:
    expected = (2 / 3) * (1 - math.cos(2 * math.pi / n))
    assert spectral_gap(mixing("ring", n)) == pytest.approx(expected, abs=1e-12)
    if n >= 16:
        assert expected == pytest.approx(4 * math.pi**2 / (3 * n**2), rel=0.02)


@pytest.mark.parametrize("side", [3, 4, 5, 8])
def test_gap_of_the_torus(side: int) -> None:
    weights = mixing("torus", side * side)
    assert sorted({round(float(w), 9) for w in weights.flatten()}) == [0.0, 0.2]
    expected = (2 / 5) * (1 - math.cos(2 * math.pi / side))
    assert spectral_gap(weights) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 12, 16, 64])
def test_gap_of_the_static_exponential_graph(n: int) -> None:
    weights = mixing("exponential", n)
    degree = math.ceil(math.log2(n))
    assert {len(senders) for senders in neighbours("exponential", n)} == {degree}
    assert spectral_gap(weights) == pytest.approx(2 / (1 + degree), abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_complete_graph_is_the_mean(n: int) -> None:
    assert spectral_gap(mixing("complete", n)) == pytest.approx(1.0, abs=1e-7)
    torch.testing.assert_close(mixing("complete", n), torch.full((n, n), 1 / n).double())


def deviation(x: Tensor) -> float:
    return float((x - x.mean(0)).norm())


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_one_peer_exponential_reaches_the_mean_in_log_n_rounds(n: int) -> None:
    x = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean = x.mean(0)
    for round_ in range(3, 3 + int(math.log2(n))):
        assert deviation(x) > 0.01
        x = mixing("one-peer", n, round_=round_) @ x
    torch.testing.assert_close(x, mean.expand(n, 5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("graph", ["ring", "torus", "exponential"])
def test_members_come_together_as_fast_as_the_gap_says(graph: str) -> None:
    n, weights = 16, mixing(graph, 16)
    rho = 1 - spectral_gap(weights)
    x = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mean = x.mean(0)
    start = deviation(x)
    for round_ in range(1, 26):
        before, x = x, weights @ x
        assert deviation(x) <= rho**round_ * start * (1 + 1e-9)
        torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-13)
    assert deviation(x) / deviation(before) == pytest.approx(rho, rel=0.01)


def test_push_sum_finds_the_mean_over_random_peers() -> None:
    n = 8
    x = torch.arange(n, dtype=torch.float64)
    w, biased = torch.ones(n, dtype=torch.float64), x.clone()
    numerator = x.clone()
    for round_ in range(80):
        weights = pushing("random", n, round_=round_)
        numerator, w = weights @ numerator, weights @ w
        biased = mixing("random", n, round_=round_) @ biased
        assert float(w.sum()) == pytest.approx(n)
    torch.testing.assert_close(numerator / w, torch.full((n,), 3.5).double(), atol=1e-6, rtol=0)
    assert abs(float(biased.mean()) - 3.5) > 0.05


@pytest.mark.parametrize("n", SIZES)
def test_pairs_are_a_matching_and_everybody_meets_everybody(n: int) -> None:
    met: set[tuple[int, int]] = set()
    for round_ in range(60 * n):
        partners = pairs(n, round_=round_)
        assert [partners[partners[i]] for i in range(n)] == list(range(n))
        assert sum(partners[i] == i for i in range(n)) == n % 2
        met |= {(i, j) for i, j in enumerate(partners) if i != j}
    assert len(met) == n * (n - 1)


def test_unknown_graph_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="torus"):
        mixing("tours", 4)
