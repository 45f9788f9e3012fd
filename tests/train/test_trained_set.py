"""Parameters that become trainable during a run are synchronized from then on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.errors import AtollError, ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.table import PRESETS
from atoll.run import Run
from atoll.run.place import Membership
from tests.contracts.strategy_suite import BATCH, batches, squared_error

APART = {"alone"}
"""Methods whose members do not share a model."""
SERVERS = {
    "async-diloco",
    "async-look-ahead",
    "halos",
    "async-sgd",
    "parameter-server",
    "stale-synchronous",
}
"""Methods whose servers hold a vector of fixed length."""


def model_of(slot: int) -> nn.Sequential:
    """Return three layers, different on every member; the first one is frozen."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(slot)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    model[0].requires_grad_(False)
    return model


def train(group: Group, folder: Path, *, outer: object, thaw: int = 5) -> list[Tensor]:
    """Train 13 steps and thaw the first layer; a scale is known to the optimizer only."""
    slot = int(group.me[1:])
    with Run(group, Membership(folder, slot=slot, num_slots=2)) as run:
        model, scale = model_of(slot), nn.Parameter(torch.full((1,), 1.0 + slot))
        groups: list[dict[str, Any]] = [
            {"params": [p for p in model.parameters() if p.requires_grad]},
            {"params": [scale]},
        ]
        inner = torch.optim.AdamW(groups, 0.02)
        optimizer, stream = run.wrap(model, inner, outer=outer), batches(slot)
        assert float(scale.detach()) == 1.0, "it is the first member's"
        for step in range(13):
            if step == thaw:
                model[0].requires_grad_(True)
                inner.add_param_group({"params": list(model[0].parameters())})
            optimizer.zero_grad()
            (squared_error(model, next(stream))[0] * scale).sum().backward()  # type: ignore[no-untyped-call]
            run.log(tokens=BATCH)
            optimizer.step()
    return [p.detach().clone() for p in (*model.parameters(), scale)]


@pytest.mark.parametrize("outer", sorted(PRESETS.keys() - APART))
def test_unfrozen_and_added_parameters_stay_equal(outer: str, tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        if outer not in SERVERS:
            return train(group, tmp_path, outer=outer)
        with pytest.raises(ConfigError, match=r"became trainable.*0\.weight, 0\.bias"):
            train(group, tmp_path, outer=outer)
        return []

    first, second = MemoryGroups(2).together(body)
    if outer not in SERVERS:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert not torch.equal(first[0], next(model_of(0).parameters())), "it was trained"


@pytest.mark.parametrize("outer", [atoll.Average(every=2), atoll.EveryStep()])
def test_members_that_unfreeze_at_different_rounds_do_not_mix(
    outer: object, tmp_path: Path
) -> None:
    def body(group: Group) -> str:
        thaw = {"w0": 3, "w1": 100}[group.me]
        try:
            train(group, tmp_path, outer=outer, thaw=thaw)
        except AtollError as error:
            return str(error)
        return ""

    found = MemoryGroups(2).together(body)
    assert any("differs from that of the group" in text for text in found)
