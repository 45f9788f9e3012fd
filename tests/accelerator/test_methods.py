"""Every method in a script, with members on the accelerator beside members on the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.table import PRESETS
from atoll.run import Run
from atoll.run.place import Membership
from tests.accelerator.noted import left_behind
from tests.accelerator.pretended import RECORD
from tests.contracts.strategy_suite import BATCH, adamw, batches, squared_error
from tests.train.test_every_method import APART, four_layers

MEMBERS, STEPS = 2, 8


def train(group: Group, preset: str, folder: Path, device: torch.device) -> dict[str, Any]:
    slot = int(group.me[1:])
    own = device if slot else torch.device("cpu")
    with Run(group, Membership(folder, slot=slot, num_slots=MEMBERS)) as run:
        model = four_layers().to(own)
        inner = adamw(model)
        optimizer = run.wrap(model, inner, outer=preset)
        stream = batches(slot)
        for _ in range(STEPS):
            loss, _ = squared_error(model, tuple(part.to(own) for part in next(stream)))  # type: ignore[arg-type]
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.log(loss=loss, tokens=BATCH)
            optimizer.step()
            optimizer.zero_grad()
            with run.evaluating():
                assert all(p.device == own for p in model.parameters())
        optimizer.load_state_dict(optimizer.state_dict())
    behind = left_behind(model, [inner]) if slot else []
    return {"end": nn.utils.parameters_to_vector(model.parameters()).cpu(), "behind": behind}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_members_of_two_devices_end_with_one_model(
    preset: str, tmp_path: Path, device: torch.device
) -> None:
    found = MemoryGroups(MEMBERS).together(lambda group: train(group, preset, tmp_path, device))
    assert RECORD.ran("addmm") > 0
    assert not found[1]["behind"]
    assert bool(found[0]["end"].isfinite().all())
    assert not torch.equal(
        found[0]["end"], nn.utils.parameters_to_vector(four_layers().parameters())
    )
    if preset not in APART:
        assert torch.equal(found[0]["end"], found[1]["end"])
