"""`run.wrap` with every method there is, in a loop with a scaler whose steps overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.table import PRESETS
from atoll.run import Run
from atoll.run.place import Membership
from tests.contracts.strategy_suite import BATCH, adamw, batches, squared_error

MEMBERS, STEPS, BAD_STEP = 4, 12, 5
APART = {"alone"}
"""Methods whose members do not end with one model."""


def four_layers() -> nn.Module:
    """Return a network with a layer for each fragment of the methods that cut models up."""
    parts = [part for _ in range(3) for part in (nn.Linear(5, 5), nn.Tanh())]
    model = nn.Sequential(*parts, nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(3)  # members are threads: torch's own is shared
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(group: Group, preset: str, folder: Path) -> dict[str, Any]:
    slot = int(group.me[1:])
    with Run(group, Membership(folder, slot=slot, num_slots=MEMBERS)) as run:
        model = four_layers()
        optimizer = run.wrap(model, adamw(model), outer=preset)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        stream = batches(slot)
        agreed = []
        for step in range(STEPS):
            loss, _ = squared_error(model, next(stream))
            bad = step == BAD_STEP and slot == 1
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.log(loss=loss, tokens=BATCH)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            before = vector(model)
            with run.evaluating():
                agreed.append(vector(model))
            assert torch.equal(before, vector(model))
        steps = run.step
        saved = optimizer.state_dict()
    return {"end": vector(model), "agreed": agreed, "steps": steps, "saved": saved}


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.every(4)
def test_members_stay_together_though_one_of_them_overflows(preset: str, tmp_path: Path) -> None:
    found = MemoryGroups(MEMBERS).together(lambda group: train(group, preset, tmp_path))
    start = vector(four_layers())
    for member in found:
        assert bool(member["end"].isfinite().all())
        assert member["steps"] == STEPS
        assert all(bool(agreed.isfinite().all()) for agreed in member["agreed"])
        assert not torch.equal(member["end"], start)
        assert set(member["saved"]) == {"state", "param_groups", "atoll"}
    same = [torch.equal(member["end"], found[0]["end"]) for member in found]
    assert all(same) or preset in APART
