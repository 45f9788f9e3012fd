from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

from atoll.group.aggregation import Aggregation
from tests.contracts.strategy_suite import small_model
from tests.reducer.attackers import flipped, huge, little, nan, replayed, samples, train
from tests.tiers import sampled

ATTACKS = [flipped, nan, huge, little, replayed]
ROBUST = [
    {"aggregate": "median"},
    {"aggregate": "trimmed:2"},
    {"aggregate": "multi-krum:2"},
    {"aggregate": "clip:0.5:3"},
    {"aggregate": "geometric-median"},
    {"admission": "norms"},
]


SHORT = [*zip(ROBUST, itertools.cycle([flipped, replayed, little]), strict=False),
         *(({"aggregate": "median"}, attack) for attack in (nan, huge))]  # fmt: skip
"""Every rule with an attack, every attack with a rule."""


@cache
def honest_loss() -> float:
    return train(Aggregation(), None)


def test_honest_members_learn_something() -> None:
    x, y = samples(99, 0, 512)
    with torch.no_grad():
        untrained = float(nn.functional.mse_loss(small_model()(x), y))
    assert honest_loss() < 0.6 * untrained


def test_the_plain_mean_leaves_out_what_is_absurd() -> None:
    assert train(Aggregation(), huge) < 1.1 * honest_loss()


@pytest.mark.parametrize("attack", [flipped, replayed])
def test_the_plain_mean_breaks(attack: object) -> None:
    assert train(Aggregation(), attack) > 1.5 * honest_loss()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("aggregation", "attack"),
    sampled(
        itertools.product(ROBUST, ATTACKS),
        lambda case: case in SHORT,
        "tests/reducer/test_attackers.py::test_robust_rules_stay_within_a_tenth_of_the_honest_loss",
    ),
    ids=lambda part: next(iter(part.values())) if isinstance(part, dict) else part.__name__,
)
def test_robust_rules_stay_within_a_tenth_of_the_honest_loss(
    aggregation: dict[str, str], attack: object
) -> None:
    assert train(Aggregation(**aggregation), attack) < 1.1 * honest_loss()  # type: ignore[arg-type]


@pytest.mark.parametrize("attack", [flipped, nan, huge, replayed])
@pytest.mark.every(3)
def test_krum_withstands_all_but_a_little(attack: object) -> None:
    """Two that say the same, inside the others' spread, are each other's nearest: Krum takes one.

    That is known (Baruch et al. 2019); it costs more than a tenth and does not break the training.
    """
    assert train(Aggregation(aggregate="krum:2"), attack) < 1.1 * honest_loss()  # type: ignore[arg-type]
    assert train(Aggregation(aggregate="krum:2"), little) < 1.5 * honest_loss()


@pytest.mark.parametrize("aggregation", [*ROBUST, {"aggregate": "krum:2"}], ids=str)
@pytest.mark.every(4)
def test_robust_rules_cost_little_where_all_are_honest(aggregation: dict[str, str]) -> None:
    assert train(Aggregation(**aggregation), None) < 1.05 * honest_loss()


def test_values_on_the_wire_may_be_coarse() -> None:
    aggregation = Aggregation(aggregate="trimmed:2", admission="norms")
    assert train(aggregation, flipped, codec="feedback(int8)") < 1.1 * honest_loss()
