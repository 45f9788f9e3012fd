from __future__ import annotations

import pytest
import torch

from atoll.errors import ConfigError
from atoll.strategies.vectors.masks import Mask


@pytest.mark.parametrize(("share", "elements"), [(0.1, 1_003), (0.4, 502), (0.005, 40_000)])
@pytest.mark.parametrize("kind", ["random", "rolled"])
def test_rounds_take_the_share_ascending_each_position_once(
    share: float, elements: int, kind: str
) -> None:
    mask = Mask(elements, share, kind, seed=3)
    for number in range(12):
        positions = mask.at(number)
        assert len(positions) == mask.size(number)
        assert abs(len(positions) - share * elements) <= 2
        assert torch.equal(positions, torch.unique(positions))
        assert positions.max() < elements


@pytest.mark.parametrize(("share", "rounds"), [(0.1, 10), (0.5, 2), (0.4, 3), (1.0, 1)])
def test_a_rolled_mask_visits_every_position_in_one_cycle(share: float, rounds: int) -> None:
    mask = Mask(1_003, share, "rolled", seed=1)
    assert mask.cycle == rounds
    for cycle in range(3):
        numbers = range(cycle * rounds, (cycle + 1) * rounds)
        seen = torch.cat([mask.at(number) for number in numbers])
        assert len(torch.unique(seen)) == 1_003
        if share in (0.1, 0.5, 1.0):
            assert len(seen) == 1_003, "each just once"


def test_every_position_is_as_likely_as_any_other() -> None:
    mask, counts = Mask(100, 0.2, "random", seed=5), torch.zeros(100)
    for number in range(4_000):
        counts[mask.at(number)] += 1
    assert (counts / 4_000 - 0.2).abs().max() < 0.035  # five deviations


def test_masks_follow_from_seed_and_round() -> None:
    first, same, other = (Mask(10_000, 0.01, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.at(4), same.at(4))
    assert not torch.equal(first.at(4), first.at(5))
    assert not torch.equal(first.at(4), other.at(4))


def test_a_model_smaller_than_a_stretch_is_visited_too() -> None:
    mask = Mask(26, 0.005, "random")
    seen = torch.cat([mask.at(number) for number in range(mask.cycle)])
    assert len(seen) == 26
    assert len(torch.unique(seen)) == 26


@pytest.mark.parametrize(("share", "kind"), [(0.0, "random"), (1.1, "random"), (0.5, "rool")])
def test_impossible_masks_are_refused(share: float, kind: str) -> None:
    with pytest.raises(ConfigError):
        Mask(10, share, kind)
