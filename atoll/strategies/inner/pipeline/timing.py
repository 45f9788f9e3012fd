"""Timing of pipeline stages in real steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.pipelining import PipelineStage

from atoll.devices.runtime import synchronize
from atoll.strategies.inner.pipeline.activations import Activations

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


class Watch:
    """Compute times and kept inputs of a rank's stages. Nearly free while disabled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on = False
        self.spent_s: defaultdict[tuple[int, bool], float] = defaultdict(float)
        """Time of the last batch by stage and direction (True: forward); the last stage includes
        the loss."""
        self.wall_s = 0.0
        """From the start of the last batch on all ranks of the row until its end on this one."""
        self.held = self.most_held = 0
        """Inputs of stages kept for a backward pass: now, and the maximum in this batch."""

    @contextmanager
    def passing(self, group: Any) -> Iterator[None]:
        """Time one batch; if enabled, collective over the row of ranks."""
        self.spent_s.clear()
        self.held = self.most_held = 0
        if self.on:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        begun = self._now()
        yield
        self.wall_s = self._now() - begun

    @contextmanager
    def busy(self, stage: int, *, forward: bool) -> Iterator[None]:
        """Count the time inside as compute time of a stage."""
        begun = self._now()
        yield
        self.spent_s[stage, forward] += self._now() - begun

    def hold(self, change: int) -> None:
        """Count a kept input (+1) or a released one (-1)."""
        self.held += change
        self.most_held = max(self.most_held, self.held)

    def _now(self) -> float:
        """Return the time in seconds; if enabled, after all queued work of the device."""
        if self.on:
            synchronize(self._device)
        return time.perf_counter()


class WatchedStage(PipelineStage):
    """torch's stage, with timing, for packed activations."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        stages: int,
        device: torch.device,
        *,
        watch: Watch,
        activations: Activations,
        **options: Any,
    ) -> None:
        super().__init__(module, number, stages, device, **options)
        self._watch, self._activations = watch, activations

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run and time the forward pass of a microbatch."""
        self._activations.enter(fwd_chunk_id)
        with self._watch.busy(self.stage_index, forward=True):
            outputs = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self._watch.hold(1)
        return outputs

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Run and time the backward pass of a microbatch."""
        with self._watch.busy(self.stage_index, forward=False):
            super().backward_one_chunk(*args, **options)
        self._watch.hold(-1)
