"""Scripts on an accelerator: what is said, and every method with a member of another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.run.placement import IDLE, watch_placement


def made(folder: Path) -> Run:
    return Run(SingleGroup(), Membership(folder, slot=0, num_slots=1))


def test_an_idle_accelerator_is_said_once(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    model = nn.Linear(2, 2)
    run = made(tmp_path)
    monkeypatch.setattr(Run, "device", property(lambda _: device))
    monkeypatch.setattr(run._meter, "tell", lambda *event: said.append(event))
    run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), outer="local-sgd")
    ((kind, text),) = said
    assert kind == IDLE
    assert "add model.to(run.device) before the optimizer is made" in text
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("here", [torch.device("cpu"), None])
def test_nothing_is_said_of_a_model_in_its_place(
    here: torch.device | None, device: torch.device
) -> None:
    said: list[Any] = []
    model = nn.Linear(2, 2).to(here or device)
    watch_placement(model, lambda: here or device, lambda *event: said.append(event))
    assert not said
    model(torch.ones(1, 2, device=here or device))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_batch_elsewhere_gets_a_note(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    watch_placement(model, lambda: device, lambda *_: None)
    with pytest.raises(RuntimeError, match="same device") as caught:
        model(torch.ones(1, 2))
    (note,) = caught.value.__notes__
    assert f"the model is on {device} and its inputs are on cpu" in note
    assert "batch = batch.to(run.device)" in note


def test_a_model_that_moves_its_inputs_is_left_alone(device: torch.device) -> None:
    class Moving(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.to(self.weight.device))

    model = Moving(2, 2).to(device)
    watch_placement(model, lambda: device, lambda *_: None)
    assert model(torch.ones(1, 2)).device == device
    with pytest.raises(AttributeError):
        model(3)
