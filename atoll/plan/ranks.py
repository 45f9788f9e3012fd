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
    """Bytes of one rank while it trains; the first four stay as they are from step to step."""

    rank: int
    place: Mapping[str, int]
    """Its coordinates by axis."""
    parameters: int
    gradients: int
    """From the backward pass to the update; those of buckets are views of these."""
    optimizer: int
    buffers: int
    gathered: int
    """Whole weights of what is sharded while it is needed, their gradients, and what is sent."""
    copies: int
    """Weights in half precision, kept from the forward to the backward pass."""
    activations: int
    working: int
    """What operations need for a moment."""
    host_model: int = 0
    """Of the first rank of several: the whole model in main memory."""
    outer: int = 0
    """Of the first rank: what the outer strategy and its codec keep in main memory."""
    exchange: int = 0
    """Of the first rank: what a round needs for a moment."""
    image: int = 0
    """Of a process by itself: the copy that checkpoints are written from, kept for the next one."""
    checkpoint: int = 0
    """Of the first rank of several: what a checkpoint, which goes to the disk as it comes from the
    ranks, needs for a moment."""

    @property
    def static(self) -> int:
        """Parameters, gradients, optimizer state and buffers."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def passing(self) -> int:
        """What there is during a step only."""
        return self.gathered + self.copies + self.activations + self.working

    @property
    def leading(self) -> int:
        """What the first rank has in main memory besides, all the time."""
        return self.host_model + self.outer + self.image

    @property
    def between(self) -> int:
        """What it needs for a moment between two steps: a round, or a checkpoint."""
        return max(self.exchange, self.checkpoint)

    def figures(self) -> dict[str, Any]:
        """Return all numbers, sums included, for JSON."""
        own = dataclasses.asdict(self)
        sums = {"static": self.static, "passing": self.passing, "leading": self.leading}
        sums["between"] = self.between
        return {**own, "place": dict(self.place), **sums}


class Maker:
    """Finds the memory of ranks whose stages are known; inside of a mode of fake tensors."""

    def __init__(
        self, options: InnerOptions, optimizer: Optimizer, groups: Mapping[str, int]
    ) -> None:
        """Keep what is the same for all ranks.

        Args:
            options: How the model is cut.
            optimizer: Made for the whole model.
            groups: Name of a trained parameter -> the group of the optimizer that it is in.
        """
        self._options, self._optimizer, self._groups = options, optimizer, groups

    def rank(self, number: int, place: Mapping[str, int], stages: Stages) -> RankMemory:
        """Return the memory of a rank.

        Args:
            number: Of the rank.
            place: Its coordinates.
            stages: What it computes.

        Raises:
            ConfigError: the optimizer needs whole parameters, and they are cut.
        """
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
            gathered=gathered, copies=passed.copies * held,
            activations=(passed.kept - passed.copies) * held, working=passed.working,
        )  # fmt: skip

    def _gathered(self, stages: Stages) -> int:
        """Return the most that is gathered at once.

        The rest group is there for the whole pass. Of the others one at a time is, with the buffer
        that it travels in; backward has its whole gradients besides. Without resharding all weights
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
        """Return the bytes of the optimizer's state, by letting it take a step on fake tensors."""
        kind = type(self._optimizer).__name__
        if cut and kind not in ELEMENTWISE:
            raise ConfigError(
                "this optimizer needs whole parameters, and these are spread over ranks",
                given=kind, expected=f"one of {', '.join(sorted(ELEMENTWISE))}",
                remedy='optimizer = "adamw" in [train], or inner = "ddp" or "pipeline"',
            )  # fmt: skip
        optimizer = self._optimizer
        optimizer.state.clear()
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [p for name, p in own.items() if self._groups[name] == number]
        for parameter in own.values():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        held = {
            id(value): value.numel() * value.element_size()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }
        optimizer.state.clear()
        return sum(held.values())
