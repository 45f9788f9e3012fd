"""The memory of one rank of an island, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.plan.cutting import gathered_together, is_sharded, shard_of
from atoll.plan.stages import Stages
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.sharded_optimizer import ELEMENTWISE


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank during training; `parameters` to `buffers` are permanent."""

    rank: int
    place: Mapping[str, int]
    """Coordinate by mesh axis."""
    parameters: int
    gradients: int
    """From backward to the update; bucket gradients are views of these."""
    optimizer: int
    buffers: int
    gathered: int
    """Gathered weights and gradients of sharded parameters, with their buffers."""
    copies: int
    """Weights in half precision, kept from forward to backward."""
    activations: int
    working: int
    stashed: int = 0
    """Older versions of the weights, for batches in flight in an asynchronous pipeline."""
    host_model: int = 0
    """First of several ranks: the whole model in main memory."""
    outer: int = 0
    """First rank: outer strategy and codec in main memory."""
    exchange: int = 0
    """First rank: temporary memory of a round."""
    image: int = 0
    """Single process: the copy that checkpoints are written from, kept for the next one."""
    checkpoint: int = 0
    """First of several ranks: temporary memory of a checkpoint, which is streamed from the ranks to
    disk.
    """

    @property
    def static(self) -> int:
        """Parameters and older versions of them, gradients, optimizer state and buffers."""
        kept = self.parameters + self.stashed
        return kept + self.gradients + self.optimizer + self.buffers

    @property
    def passing(self) -> int:
        """Memory used during a step only."""
        return self.gathered + self.copies + self.activations + self.working

    @property
    def leading(self) -> int:
        """Further permanent main memory of the first rank."""
        return self.host_model + self.outer + self.image

    @property
    def between(self) -> int:
        """Temporary memory between two steps: a round or a checkpoint."""
        return max(self.exchange, self.checkpoint)

    def figures(self) -> dict[str, Any]:
        """Return all numbers and sums for JSON."""
        own = dataclasses.asdict(self)
        sums = {"static": self.static, "passing": self.passing, "leading": self.leading}
        sums["between"] = self.between
        return {**own, "place": dict(self.place), **sums}


class Maker:
    """Computes the memory of ranks from their stages; used within a fake tensor mode."""

    def __init__(
        self, options: InnerOptions, optimizer: Optimizer, groups: Mapping[str, int]
    ) -> None:
        """`groups` maps names of trained parameters to their optimizer group."""
        self._options, self._optimizer, self._groups = options, optimizer, groups

    def rank(self, number: int, place: Mapping[str, int], stages: Stages) -> RankMemory:
        """Return the memory of a rank; raises ConfigError if its optimizer cannot be sharded."""
        parameters = stages.parameters
        gathered = 0
        own: dict[str, nn.Parameter] = {}
        nbytes = trained = 0
        sharded, ranks = is_sharded(self._options.shape), self._options.shape.shard
        for name, parameter in parameters.items():
            size, held = parameter.element_size(), parameter.numel()
            shape: tuple[int, ...] = tuple(parameter.shape)
            if sharded:
                share = shard_of(shape, ranks=ranks, rank=place["shard"])
                shape, held = share.shape, share.padded
            nbytes += held * size
            if parameter.requires_grad:
                trained += held * size
                own[name] = nn.Parameter(torch.empty(shape, dtype=parameter.dtype))
        if sharded:
            gathered = self._gathered(stages)
        passed, held = stages.passed, stages.held
        return RankMemory(
            rank=number, place=place, parameters=nbytes, gradients=trained,
            optimizer=self._state(own, cut=sharded or self._options.shape.tensor > 1),
            buffers=sum(b.numel() * b.element_size() for b in stages.buffers),
            stashed=trained * stages.delay, gathered=gathered, copies=passed.copies * held,
            activations=(passed.kept - passed.copies) * held, working=passed.working,
        )  # fmt: skip

    def _gathered(self, stages: Stages) -> int:
        """Return the peak of gathered parameters.

        The rest group is gathered for the whole pass. Other groups are gathered one at a time with
        their transfer buffer; backward adds the full gradients. Without resharding all weights
        stay.
        """
        total = 0
        for module, units in zip(stages.modules, stages.units, strict=True):
            groups, rest = gathered_together(module, units)
            largest = max(groups, default=0)
            weights = largest if self._options.reshard else sum(groups)
            total += rest + weights + max(rest, largest) + largest
        return total

    def _state(self, own: Mapping[str, nn.Parameter], *, cut: bool) -> int:
        """Return the bytes of the optimizer's state after a step on fake tensors."""
        kind = type(self._optimizer).__name__
        if cut and kind not in ELEMENTWISE:
            raise ConfigError(
                "this optimizer needs whole parameters, and these are spread over ranks",
                given=kind, expected=f"one of {', '.join(sorted(ELEMENTWISE))}",
                remedy='optimizer = "adamw" in [train], or inner = "ddp" or "pipeline"',
            )  # fmt: skip
        for number, group in enumerate(self._optimizer.param_groups):
            group["params"] = [p for name, p in own.items() if self._groups[name] == number]
        return optimizer_bytes(self._optimizer)


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state after a step on fake tensors."""
    optimizer.state.clear()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    held = {
        id(value): value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    optimizer.state.clear()
    return sum(held.values())
