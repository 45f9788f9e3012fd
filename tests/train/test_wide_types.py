"""`run.wrap` with every method there is, and a model of float64 and complex parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.table import PRESETS
from atoll.run import Run
from atoll.run.place import Membership

APART = {"alone"}
"""Methods whose members do not end with one model."""


class Spectral(nn.Module):
    """Three layers of a float64 matrix and a complex filter; a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weights, self.filters = nn.ParameterList(), nn.ParameterList()
        for _ in range(3):
            self.weights.append(torch.randn(5, 5, generator=generator, dtype=torch.float64) / 3)
            self.filters.append(torch.randn(5, generator=generator, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.0 + 1e-12, dtype=torch.float64))
        self.register_buffer("spectrum", torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        for weight, filtered in zip(self.weights, self.filters, strict=True):
            x = (torch.tanh(x @ weight) * filtered).abs()
        found: Tensor = x * self.scale
        return found


def train(group: Group, preset: str, folder: Path) -> list[Tensor]:
    slot = int(group.me[1:])
    generator = torch.Generator().manual_seed(slot)
    with Run(group, Membership(folder, slot=slot, num_slots=2)) as run:
        model = Spectral()
        optimizer = run.wrap(model, torch.optim.AdamW(model.parameters(), 0.01), outer=preset)
        for _ in range(8):
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
            (model(x) - 1).square().mean().backward()
            run.log(tokens=4)
            optimizer.step()
            before = [p.detach().clone() for p in model.parameters()]
            with run.evaluating():
                pass
            for old, new in zip(before, model.parameters(), strict=True):
                assert torch.equal(old, new), "evaluating changes nothing"
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_both_parts_of_a_number_are_trained_alike(preset: str, tmp_path: Path) -> None:
    first, second = MemoryGroups(2).together(lambda group: train(group, preset, tmp_path))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert same != (preset in APART)
    before = list(Spectral().parameters())
    filters = [(a, b.detach()) for a, b in zip(first, before, strict=True) if a.is_complex()]
    assert len(filters) == 3
    part = any if preset == "sparseloco" else all  # it sends one of 16 values
    assert part(not torch.equal(a.imag, b.imag) for a, b in filters)
