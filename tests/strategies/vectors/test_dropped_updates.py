from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.strategies.vectors.masks import check_probability, lost_updates

MEMBERS = [f"w{i}" for i in range(8)]


def lost(round_: int, *, probability: float = 0.3, seed: int = 1) -> frozenset[str]:
    return lost_updates(MEMBERS, round_=round_, probability=probability, seed=seed)


def test_as_many_are_lost_as_the_probability_says() -> None:
    count = sum(len(lost(round_)) for round_ in range(500))
    assert count / 4_000 == pytest.approx(0.3, abs=0.03)


def test_draw_of_a_member_is_independent_of_others() -> None:
    for round_ in range(50):
        few = lost_updates(MEMBERS[:4], round_=round_, probability=0.3, seed=1)
        assert few == lost(round_) & set(MEMBERS[:4])


def test_rounds_and_seeds_draw_anew() -> None:
    assert len({lost(round_) for round_ in range(20)}) > 5
    assert [lost(r) for r in range(20)] != [lost(r, seed=2) for r in range(20)]


def test_none_is_lost_where_all_would_be() -> None:
    assert lost(0, probability=0.999999) == frozenset()
    assert lost(0, probability=0.0) == frozenset()


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match="drop"):
        check_probability(probability)
