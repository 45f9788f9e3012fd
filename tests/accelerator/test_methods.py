"""Every method in a script, with members on the accelerator beside members on the processor."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.devices import transfer
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.overlapped import Streaming
from atoll.methods.table import PRESETS
from atoll.run import Run
from atoll.run.place import Membership
from atoll.strategies.vectors.flat import Flat
from tests.accelerator.child import PRETENDED_ONLY
from tests.accelerator.noted import assert_one_model, left_behind
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
@pytest.mark.every(5)
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
        assert_one_model(preset, found[0]["end"], found[1]["end"])


OVERLAPPED = Streaming(every=4, fragments=2, delay=1, mix=0.5)


def stream(group: Group, folder: Path, device: torch.device) -> set[str]:
    """Train by overlapped rounds; return who waited for the device before the last round."""
    slot = int(group.me[1:])
    own = device if slot else torch.device("cpu")
    with Run(group, Membership(folder, slot=slot, num_slots=MEMBERS)) as run:
        model = four_layers().to(own)
        optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), outer=OVERLAPPED)
        if slot:
            threading.current_thread().name = "trainer"
            RECORD.readers.clear()
            RECORD.streams.clear()
        stream = batches(slot)
        for _ in range(STEPS):
            loss, _ = squared_error(model, tuple(part.to(own) for part in next(stream)))  # type: ignore[arg-type]
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        waited = {name for name, action in RECORD.streams if action.startswith("waits")}
        return waited | set(RECORD.readers)


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=PRETENDED_ONLY)])
def test_training_does_not_wait_for_an_overlapped_rounds_copies(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, *, streams: bool
) -> None:
    if streams:
        monkeypatch.setattr(transfer, "STREAMS", ("pretended",))
        monkeypatch.setattr(transfer, "page_locked", lambda n: torch.empty(n, dtype=torch.uint8))
    found = MemoryGroups(MEMBERS).together(lambda group: stream(group, tmp_path, device))
    assert found[1] == {"round-w1"}
    if streams:
        own = [action for name, action in RECORD.streams if name == "round-w1"]
        assert own[:2] == ["own stream waits for main stream", "waits for own stream"]


def test_a_snapshot_and_a_mixture_are_those_of_main_memory(device: torch.device) -> None:
    here = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(2, dtype=torch.complex64)]
    there = [tensor.to(device) for tensor in here]
    expected, later = Flat(here).read(), Flat(there).snapshot()
    for tensor in there:
        tensor.zero_()
    assert not RECORD.readers
    assert torch.equal(later(), expected)
    for tensor, values in zip(there, here, strict=True):
        tensor.copy_(values)
    RECORD.readers.clear()
    towards = torch.randn(len(expected))
    Flat(there).mix(towards.clone(), keep=0.25)
    assert not RECORD.readers
    Flat(here).mix(towards, keep=0.25)
    torch.testing.assert_close(Flat(there).read(), Flat(here).read())
