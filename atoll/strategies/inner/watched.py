"""Stages of a pipeline that can be watched: how long they compute, how many inputs they keep."""

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

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""


class Watch:
    """What the stages of a rank do while it is on. Costs next to nothing while it is off."""

    def __init__(self, device: torch.device) -> None:
        """Be off."""
        self._device = device
        self.on = False
        self.spent_s: defaultdict[tuple[int, bool], float] = defaultdict(float)
        """Time of the last batch by stage, and whether it was forward; the last one's has the
        loss."""
        self.wall_s = 0.0
        """From when all ranks of the row began with the last batch until this one was done."""
        self.held = self.most_held = 0
        """Inputs of stages that are kept for a backward pass, and most at a time in this batch."""

    @contextmanager
    def passing(self, group: Any) -> Iterator[None]:
        """Watch one batch inside; collective over the row of ranks if it is on."""
        self.spent_s.clear()
        self.held = self.most_held = 0
        if self.on:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        begun = self._now()
        yield
        self.wall_s = self._now() - begun

    @contextmanager
    def busy(self, stage: int, *, forward: bool) -> Iterator[None]:
        """Count the time inside as work of a stage."""
        begun = self._now()
        yield
        self.spent_s[stage, forward] += self._now() - begun

    def hold(self, change: int) -> None:
        """Take note that one more input is kept, or one less."""
        self.held += change
        self.most_held = max(self.most_held, self.held)

    def _now(self) -> float:
        """Return the time in seconds; if it is on, when the device has done all it was told."""
        if self.on and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


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
        with self._watch.busy(self.stage_index, forward=True):
            outputs = super().forward_one_chunk(*args, **options)
        self._watch.hold(1)
        return outputs

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Do the backward pass of a microbatch."""
        with self._watch.busy(self.stage_index, forward=False):
            super().backward_one_chunk(*args, **options)
        self._watch.hold(-1)
