from __future__ import annotations

import torch
from torch import nn

from atoll.strategies.vectors.whole_state import (
    MOST_GROUPS,
    layout,
    not_synchronised,
    report,
    tensor_digest,
    values,
    whole_state,
    words,
)
from atoll.task import Task


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.norm.requires_grad_(False)
        self.register_buffer("table", torch.ones(2), persistent=False)


def task(model: nn.Module) -> Task:
    return Task(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_words_carry_every_kind_of_number_bit_for_bit() -> None:
    tensors = [
        torch.tensor([float("-inf"), -0.0, 1e-45]), torch.randn(3).bfloat16(),
        torch.tensor(2**60 + 1), torch.tensor([True, False, True]),
        torch.randn(2, 2, dtype=torch.complex128), torch.empty(0),
    ]  # fmt: skip
    found = values(words(tensors), tensors)
    for before, after in zip(tensors, found, strict=True):
        assert tensor_digest(before) == tensor_digest(
            torch.view_as_complex(after) if before.is_complex() else after
        )


def test_half_precision_counts_as_the_float32_it_rounds_to() -> None:
    half = torch.randn(4).bfloat16()
    assert tensor_digest(half) == tensor_digest(half.float())
    assert layout([half]) == layout([half.float()])
    assert layout([half]) != layout([half.double()])


def test_the_report_covers_what_rounds_do_not_exchange() -> None:
    model = Model()
    before = report(task(model))
    assert set(before["own_tensors"]) == {"norm.num_batches_tracked"}
    assert set(before["tensors"]) == whole_state(task(model)).keys() - before["own_tensors"].keys()
    model.norm.weight.data[0] = 5.0  # frozen
    after = report(task(model))
    assert after["digest"] != before["digest"]
    differs = {n for n in after["tensors"] if after["tensors"][n] != before["tensors"][n]}
    assert differs == {"norm.weight"}
    model.norm.get_buffer("num_batches_tracked").add_(1)
    assert report(task(model))["digest"] == after["digest"]


def test_the_report_of_a_large_model_stays_small() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2 * MOST_GROUPS)])
    found = report(task(model))["tensors"]
    assert len(found) == MOST_GROUPS
    assert "0 to 1" in found


def test_what_is_not_kept_equal_is_listed() -> None:
    frozen, counts, unsaved, wide = not_synchronised(task(Model()), rounded=False)
    assert frozen.startswith("norm.weight, norm.bias (frozen")
    assert counts.startswith("norm.num_batches_tracked (counts")
    assert unsaved.startswith("table (buffers")
    assert wide.startswith("wide (float64")
    assert not_synchronised(task(nn.Linear(1, 1)), rounded=False) == []
