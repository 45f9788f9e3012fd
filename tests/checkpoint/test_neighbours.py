"""A lost stage becomes the mean of its neighbours, layer by layer."""

from __future__ import annotations

import pytest
import torch

from atoll.checkpoint.neighbours import NeighboursDiffer, fill_from_neighbours


def layers(*numbers: int, value: float = 0.0, width: int = 2) -> dict[str, torch.Tensor]:
    return {
        f"model/blocks.{n}.up.weight": torch.full((width, 2), float(value + n)) for n in numbers
    }


def test_layers_become_the_mean_of_those_beside_them() -> None:
    lost = layers(2, 3, value=100)
    embedding = {"model/embed.weight": torch.ones(9, 2), "optimizer/blocks.1.up.weight": None}
    before = {**embedding, **layers(0, 1)}
    fill_from_neighbours(lost, [before, layers(4, 10)])  # type: ignore[list-item]
    assert torch.equal(lost["model/blocks.2.up.weight"], torch.full((2, 2), 2.0))
    assert torch.equal(lost["model/blocks.3.up.weight"], torch.full((2, 2), 5.5))


def test_equal_neighbours_give_a_copy() -> None:
    lost = layers(1)
    fill_from_neighbours(lost, [layers(0, value=7), layers(2, value=5)])
    assert torch.equal(lost["model/blocks.1.up.weight"], torch.full((2, 2), 7.0))


def test_a_neighbour_with_fewer_layers_gives_its_last_again() -> None:
    lost = layers(1, 2)
    fill_from_neighbours(lost, [layers(0, value=1), layers(3, 4, value=0)])
    assert torch.equal(lost["model/blocks.2.up.weight"], torch.full((2, 2), 2.5))


@pytest.mark.parametrize("other", [layers(2, width=3), {"model/head.weight": torch.ones(2, 2)}])
def test_other_layers_are_refused_and_nothing_changes(other: dict[str, torch.Tensor]) -> None:
    lost = layers(1)
    with pytest.raises(NeighboursDiffer, match="cannot be rebuilt") as refused:
        fill_from_neighbours(lost, [layers(0), other])
    assert "blocks.1.up.weight" in refused.value.message()
    assert torch.equal(lost["model/blocks.1.up.weight"], torch.ones(2, 2))
