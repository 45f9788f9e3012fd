"""Stages of a pipeline that can be watched: how long they compute, how many inputs they keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage


class Watch:
    """What a rank's stages did while it was on. Costs nothing while it is off."""

    def __init__(self, device: torch.device) -> None:
        """Be off."""
        self._device = device
        self.on = False
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.busy_s = 0.0
        """How long forward, loss and backward took."""
        self.held = 0
        """Inputs of stages that are kept for a backward pass now."""
        self.most_held = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time inside as work."""
        if not self.on:
            yield
            return
        begun = self.now()
        yield
        self.busy_s += self.now() - begun

    def now(self) -> float:
        """Return the time when the device has done all it was told, in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def hold(self, change: int) -> None:
        """Take note that one more input is kept, or one less."""
        self.held += change
        self.most_held = max(self.most_held, self.held)


class WatchedStage(PipelineStage):
    """torch's stage, watched."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        stages: int,
        device: torch.device,
        *,
        watch: Watch,
        **options: Any,
    ) -> None:
        """Be stage `number`; see torch's for the rest."""
        super().__init__(module, number, stages, device, **options)
        self._watch = watch

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Do the forward pass of a microbatch."""
        with self._watch.busy():
            outputs = super().forward_one_chunk(*args, **options)
        self._watch.hold(1)
        return outputs

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Do the backward pass of a microbatch."""
        with self._watch.busy():
            super().backward_one_chunk(*args, **options)
        self._watch.hold(-1)
