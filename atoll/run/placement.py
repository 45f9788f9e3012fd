"""Warn if a script's model is not on its device; nothing but the script moves models or batches."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError

log = logging.getLogger(__name__)

CPU = "cpu"
IDLE = "accelerator-idle"
"""Kind of the event."""

Tell = Callable[[str, str], None]
"""Send an event: its kind, its text."""


def watch_placement(model: nn.Module, device_of: Callable[[], torch.device], tell: Tell) -> None:
    """Report once if the model leaves the accelerator idle or gets a batch from another device.

    Nothing is moved. The first forward pass is watched: if it fails and the model and its inputs
    are on different devices, the error gets a note with the line to add.

    Args:
        model: What the script trains.
        device_of: Returns the script's own device, `run.device`.
        tell: Sends an event.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        return  # placed in parts, or without parameters
    (there,) = devices
    if there.type == CPU:
        _say_idle(device_of, tell)
    elif there.type != "meta":
        log.info("the model computes on %s", there)
    for part in model if isinstance(model, nn.ModuleList) else [model]:
        _FirstPass(part, there)


def _say_idle(device_of: Callable[[], torch.device], tell: Tell) -> None:
    try:
        own = device_of()
    except ConfigError:  # the job asks for a device that is not here; the script does not use it
        return
    if own.type == CPU:
        return
    text = (
        f"the accelerator {own} is idle: the model is in main memory; add model.to(run.device) "
        'before the optimizer is made, and move batches likewise, or set device = "cpu" in [job]'
    )
    log.warning("%s", text)
    tell(IDLE, text)


class _FirstPass:
    """Hooks of a model that last until its first forward pass is done."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._other = device, ""
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = {value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        self._other = ", ".join(sorted(str(device) for device in found - {self._device}))

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for handle in self._handles:
            handle.remove()
        error = sys.exception()
        if self._other and isinstance(error, RuntimeError):
            error.add_note(
                f"the model is on {self._device} and its inputs are on {self._other}: add "
                f"batch = batch.to(run.device), and model.to(run.device) if it is not there"
            )
