from __future__ import annotations

import pytest
import torch

from atoll.errors import ConfigError
from atoll.strategies.vectors.masks import check_share, prune


def test_wrong_signs_then_smallest_values_are_pruned() -> None:
    part = torch.tensor([[4.0, -3.0, 1.0, 2.0], [-5.0, -1.0, 0.5, -2.0]])
    prune([part], 0.25)
    assert part.tolist() == [[4.0, 0.0, 1.0, 2.0], [-5.0, -1.0, 0.0, -2.0]]
    prune([part], 0.5)
    assert part.tolist() == [[4.0, 0.0, 0.0, 2.0], [-5.0, 0.0, 0.0, -2.0]]


def test_convolution_has_one_neuron_per_output() -> None:
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0])
    kernel = torch.arange(1.0, 17.0).view(2, 2, 2, 2)
    prune([vector, kernel], 0.5)
    assert vector.tolist() == [0.0, 0.0, 3.0, 4.0]
    assert (kernel == 0).sum(dim=(1, 2, 3)).tolist() == [4, 4]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_exactly_the_share_of_a_neuron_is_pruned(share: float) -> None:
    before = torch.randn(16, 40, generator=torch.Generator().manual_seed(4))
    after = before.clone()
    prune([after], share)
    assert (after == 0).sum(1).tolist() == [int(share * 40)] * 16
    assert torch.equal(after[after != 0], before[after != 0])


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="prune"):
        check_share(share)
