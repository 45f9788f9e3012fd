"""Which contributions look odd, and how a rating follows gains."""

from __future__ import annotations

import pytest

from atoll.verification.scores import odd_ones, rated
from atoll.wire.messages import Look


def round_of(**odd: Look) -> dict[str, Look]:
    return {**{f"w{i}": Look(1.0 + i / 100, 0.3, 0.4) for i in range(4)}, **odd}


def test_usual_contributions_are_not_odd() -> None:
    assert odd_ones(round_of()) == {}
    assert odd_ones({}) == {}


def test_flipped_small_and_copied_ones_are_odd() -> None:
    found = odd_ones(
        round_of(flipped=Look(1.0, 0.1, -0.4), lazy=Look(0.2, 0.3, 0.4), copy=Look(1.0, 0.999, 0.5))
    )
    assert found == {
        "flipped": "it points against the others",
        "lazy": "it is small",
        "copy": "it resembles another contribution",
    }


def test_where_nobody_agrees_a_direction_says_nothing() -> None:
    apart = {name: Look(1.0, 0.0, -0.01) for name in round_of()}
    assert odd_ones({**apart, "w9": Look(1.0, 0.0, -0.3)}) == {}


def test_rating_follows_what_is_usual() -> None:
    rating = 0.0
    for _ in range(30):
        rating = rated(rating, own=0.03, held_out=0.02)
    assert rating == pytest.approx(1.0, abs=0.01)
    assert rated(rating, own=0.01, held_out=0.02) == pytest.approx(0.6, abs=0.01)
