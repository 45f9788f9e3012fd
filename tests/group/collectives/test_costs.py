from __future__ import annotations

import math

import pytest

from atoll.errors import ConfigError
from atoll.group.aggregation import COLLECTIVES
from atoll.group.collectives.costs import moved_bytes, seconds
from atoll.group.collectives.topology import folded, group_size, tree_positions

S = 4 * 9600
"""Bytes of a vector that 2, 3, 4, 5, 6, 8 and 16 divide."""


def sent(name: str, n: int) -> list[int]:
    return [moved_bytes(name, rank=r, members=n, elements=S // 4)[0] for r in range(n)]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 16])
def test_a_ring_sends_two_n_minus_one_nths(n: int) -> None:
    assert sent("ring", n) == [2 * (n - 1) * S // n] * n


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_butterfly_of_a_power_of_two_sends_what_a_ring_sends(n: int) -> None:
    assert sent("butterfly", n) == sent("ring", n)


@pytest.mark.parametrize("n", range(2, 20))
def test_nobody_in_a_tree_sends_more_than_twice(n: int) -> None:
    assert max(sent("tree", n)) <= 2 * S
    assert sum(sent("tree", n)) == 2 * (n - 1) * S


def test_the_middle_of_a_star_sends_to_all_others() -> None:
    assert sent("star", 5) == [4 * S, S, S, S, S]


def test_groups_send_little_to_each_other() -> None:
    n, size = 8, 2
    inside, between = 2 * (size - 1) * S // size, 2 * (n // size - 1) * S // n
    assert sent("hierarchical", n) == [inside + between] * n


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 12])
def test_what_is_sent_is_received(name: str, n: int) -> None:
    for elements in (0, 1, 10, 1001):
        both = [moved_bytes(name, rank=r, members=n, elements=elements) for r in range(n)]
        assert sum(out for out, _ in both) == sum(into for _, into in both)


@pytest.mark.parametrize("n", range(1, 40))
def test_both_trees_connect_all_and_nobody_has_children_in_both(n: int) -> None:
    places = [tree_positions(rank, n) for rank in range(n)]
    for which in (0, 1):
        parents = {rank: places[rank][which].parent for rank in range(n)}
        assert list(parents.values()).count(-1) == 1
        for rank in range(n):
            assert all(parents[child] == rank for child in places[rank][which].children)
            seen = set()
            while rank >= 0:
                assert rank not in seen
                seen.add(rank)
                rank = parents[rank]
    both = [rank for rank in range(n) if places[rank][0].children and places[rank][1].children]
    assert len(both) <= 1  # of an odd number one member is not in between: the root of the first


@pytest.mark.parametrize(
    ("n", "size", "power"), [(1, 1, 1), (2, 1, 2), (4, 2, 4), (6, 2, 4), (7, 1, 4), (16, 4, 16)]
)
def test_groups_and_powers(n: int, size: int, power: int) -> None:
    assert group_size(n) == size
    assert folded(n) == power


def test_the_model_of_time_says_who_is_fastest_where() -> None:
    def of(name: str, nbytes: float, n: int = 16) -> float:
        return seconds(name, members=n, nbytes=nbytes, latency_s=0.05, bytes_per_s=1e7)

    small, large = 100.0, 1e9
    assert of("star", small) < of("butterfly", small) < of("ring", small)
    assert of("ring", large) < of("tree", large) < of("star", large)
    assert of("hierarchical", small) < of("ring", small)
    assert of("ring", large, n=4) == pytest.approx(2 * 3 * 0.05 + 2 * 3 / 4 * 100)
    assert all(of(name, large, n=1) == 0.0 for name in COLLECTIVES)
    assert math.isfinite(of("butterfly", large, n=5))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        moved_bytes("rings", rank=0, members=2, elements=1)
    with pytest.raises(ConfigError, match="did you mean 'tree'"):
        seconds("trees", members=2, nbytes=1, latency_s=0, bytes_per_s=1)
