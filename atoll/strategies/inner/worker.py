"""The commands that every rank of an island executes for its leader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.start_phase import StartPhase
from atoll.strategies.inner.base import Parts
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.gather_scatter import Subgroups, Transport, trim_heap
from atoll.strategies.inner.gradient_norm import GradientNorm
from atoll.strategies.inner.host_model import PULL, PUSH
from atoll.strategies.inner.model_facts import untrained_state
from atoll.strategies.inner.options import ASYNC, InnerOptions
from atoll.strategies.inner.precision import Scaler
from atoll.strategies.inner.sharded_optimizer import (
    LocalShard,
    OptimizerState,
    Outline,
    State,
    clip_factor,
)
from atoll.strategies.inner.untrained_state import UntrainedState

if TYPE_CHECKING:
    from atoll.strategies.inner.pipeline.async_steps import AsyncSteps
    from atoll.strategies.inner.pipeline.turning import Turning

BUILD, STEP, LOSS, SEED = "build", "step", "loss", "seed"
GRADIENTS, UPDATE, SCALE = "gradients", "update", "scale"
TAKE, GIVE = "take the optimizer", "give the optimizer"
OUTLINE, FETCH = "outline the optimizer", "fetch from the optimizer"
"""Verbs, with those of :mod:`atoll.strategies.inner.host_model`."""

SEEDS_APART = 1_000_003
"""Difference between the seeds of consecutive ranks."""

Make = Callable[[], tuple[nn.Module, Optimizer]]
"""Returns the whole model and its optimizer, equal on all ranks except for the values, which are
those of rank 0. Meta tensors get memory when the model is split."""
Divide = Callable[..., Parts]


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of a step, equal on every rank."""

    loss: float
    norm: float
    """Of the whole gradient, before clipping."""
    updated: bool
    """Whether parameters were updated."""
    overflowed: bool
    """Whether gradients overflowed in half precision; the next step uses a smaller scale."""


class Worker:
    """One rank's part of the training; rank 0 has one, too."""

    def __init__(
        self,
        broadcaster: CommandBroadcaster,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        options: InnerOptions,
        make: Make,
        divided: Divide = split_model,
    ) -> None:
        """Register the commands; nothing is built before the first one.

        `make` makes the whole model and its optimizer, `divided` this rank's parts of it.
        """
        self.mesh, self._device, self._options = mesh, device, options
        self._start = broadcaster.start
        self._make, self._divide = make, divided
        self._subgroups = Subgroups()
        self._async: AsyncSteps | None = None
        """Of a pipeline that is not flushed between batches."""
        self.scaler = Scaler(options.precision)
        """Of the loss, against underflow; equal on all ranks."""
        self.host_tensors: Mapping[str, Tensor] | None = None
        """On rank 0: the whole model's parameters and buffers by name."""
        self.offered: tuple[State, Sequence[Mapping[str, Any]]] | None = None
        """On rank 0: a state of the optimizer to be loaded by `give`."""
        verbs: dict[str, Callable[..., Any]] = {
            BUILD: self.build, STEP: self.step, LOSS: self.loss, PULL: self.pull, PUSH: self.push,
            TAKE: self.take, OUTLINE: self.outline, FETCH: self.fetch, GIVE: self.give,
            SEED: self.seed, GRADIENTS: self.gradients, UPDATE: self.update, SCALE: self.rescale,
        }  # fmt: skip
        self._streams = options.schedule == ASYNC and mesh["pipeline"].size() > 1
        for verb, handler in verbs.items():
            if verb not in (BUILD, STEP) and self._streams:
                handler = partial(self._drained, handler)
            broadcaster.on(verb, handler, ahead=self._streams and verb == STEP)

    def _drained(self, handler: Callable[..., Any], *values: Any, **words: Any) -> Any:
        """Run a handler when no batch is in flight."""
        if self._async is not None:
            self._async.drain()
        return handler(*values, **words)

    # ---------------------------------------------------------------------------- building

    def build(self, *sample: Tensor) -> None:
        """Build this rank's parts and its optimizer; collective, as all that follows.

        `sample`: some inputs and their targets, with which a pipeline is balanced.

        Raises:
            ConfigError: the model or its optimizer cannot be split like that.
        """
        self._start.enter(StartPhase.BUILDING)
        model, optimizer = self._make()
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        state = {names[p]: dict(own) for p, own in optimizer.state.items()}
        for group in optimizer.param_groups:  # references would keep the whole model in memory
            group["params"] = []
        optimizer.state.clear()
        del names
        more = bool(untrained_state(model))
        self._start.enter(StartPhase.DIVIDING)
        given = {"sample": (sample[0], sample[1])} if sample else {}
        self._parts = self._divide(
            model, self._options, mesh=self.mesh, device=self._device, **given
        )
        self._start.enter(StartPhase.FILLING)
        self._fill(model)
        del model
        parameters, buffers = self._parts.parameters(), self._parts.buffers()
        self._own = LocalShard(optimizer, parameters, groups=groups, state=state)
        self._turning = _turning(self._parts, self._own, self._options)
        if self._streams:
            self._async = _async_steps(self._parts, self._own, self._options)
        self._norm, self.scaler = GradientNorm(self._parts), Scaler(self._options.precision)
        self._optimizer_state = OptimizerState(
            optimizer, parameters, steps_on=self._own.steps_on, device=self._device,
            subgroups=self._subgroups,
        )  # fmt: skip
        self._transport = Transport(
            {**parameters, **buffers}, device=self._device, subgroups=self._subgroups
        )
        self._untrained = None
        if more:  # most models are trained whole
            self._untrained = UntrainedState(
                self._parts.untrained(), host_tensors=self.host_tensors, device=self._device,
                subgroups=self._subgroups,
            )  # fmt: skip
        self._parts.train(True)
        self._start.enter(StartPhase.READY)

    def _fill(self, model: nn.Module) -> None:
        """Copy rank 0's values into this rank's parts, frozen ones included."""
        parts = self._parts  # by its names: shared weights are separate on sharded stages
        held = {**parts.parameters(), **parts.untrained(), **dict(model.named_buffers())}
        here = {name: tensor for name, tensor in held.items() if not tensor.is_meta}
        Transport(here, device=self._device, subgroups=self._subgroups).deal(self.host_tensors)
        self._parts.constrain()
        trim_heap()

    def seed(self, *, seed: int) -> None:
        """Seed torch, so that dropout differs between rows and between stages.

        Ranks that differ only along the tensor axis draw the same numbers.
        """
        place = 0
        for axis in ("replicate", "shard", "pipeline"):
            place = place * self.mesh[axis].size() + self.mesh.get_local_rank(axis)
        torch.manual_seed(seed + SEEDS_APART * place)

    # ---------------------------------------------------------------------------- training

    @property
    def constrained(self) -> bool:
        """Whether the parts change what `push` gives them."""
        return self._parts.constrained

    def step(self, inputs: Tensor, targets: Tensor, *, lr: Sequence[float]) -> Stepped:
        """Compute gradients and update; see `gradients` and `update`.

        An asynchronous pipeline returns what is known of earlier batches, on the first rank.
        """
        if self._async is not None:
            back = self._async.step(inputs, targets, rates=lr)
            return Stepped(back.loss, back.norm, updated=back.finite, overflowed=False)
        done = self.gradients(inputs, targets)
        if done.updated:
            self.update(lr=lr)
        return done

    def gradients(self, inputs: Tensor, targets: Tensor) -> Stepped:
        """Compute gradients of a batch, and drop them if they are not finite.

        All ranks decide alike, because the decision depends on sums over all ranks only.

        Raises:
            ConfigError: the rows cannot be divided evenly.
        """
        scaler = self.scaler
        if self._turning is not None:
            self._turning.begin()
        share = self._parts.backward(inputs, targets, scale=scaler.scale, summed=False)
        length = self._norm.measure(share)  # one sum over the ranks for norm and loss
        loss, norm = length.loss, length.value / scaler.scale
        finite = length.finite and math.isfinite(norm) and math.isfinite(loss)
        self._factor = clip_factor(norm, self._options.clip) / scaler.scale
        usable = scaler.update(finite=finite)
        if finite and usable:
            return Stepped(loss, norm, updated=True, overflowed=False)
        self._own.forget()
        overflowed = not usable and not scaler.exhausted
        return Stepped(loss, norm, updated=False, overflowed=overflowed)

    def rescale(self, *, scale: float, good_steps: int) -> None:
        """Load a saved loss scale."""
        self.scaler.load_state_dict({"scale": scale, "good_steps": good_steps})

    def update(self, *, lr: Sequence[float]) -> None:
        """Clip the gradients by the norm of all, and step with one rate per optimizer group."""
        self._own.set_rates(lr)
        with self._parts.stepping():
            self._own.step(factor=self._factor)
        if self._turning is not None:
            self._turning.stepped()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch without dropout and gradients."""
        self._parts.train(False)
        try:
            return self._parts.loss(inputs, targets).detach().cpu()
        finally:
            self._parts.train(True)

    # ------------------------------------------------------------------------------- state

    def pull(self) -> None:
        """Copy the ranks' parts into the host model."""
        for name, whole in self._transport.gather():
            if self.host_tensors is not None:
                self.host_tensors[name].detach().copy_(whole)
        if self._untrained is not None:
            self._untrained.gather(self.host_tensors)

    def push(self) -> None:
        """Copy the host model into the ranks' parts."""
        self._transport.deal(self.host_tensors)
        if self._untrained is not None:
            self._untrained.deal(self.host_tensors)
        self._parts.constrain()

    def take(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's whole state on rank 0, and nothing on the others."""
        return self._optimizer_state.gather()

    def outline(self) -> Outline:
        """Return the same with large tensors by their kind."""
        return self._optimizer_state.outline()

    def fetch(self, *, name: str, key: str) -> Tensor | None:
        """Return one of these tensors on rank 0."""
        return self._optimizer_state.fetch(name, key)

    def give(self) -> None:
        """Load the optimizer's state that rank 0 was `offered`."""
        state, groups = self.offered if self.offered is not None else (None, None)
        self._optimizer_state.deal(state, groups)
        self.offered = None
        if self._turning is not None:
            self._turning.restored()


def _turning(parts: Any, own: LocalShard, options: InnerOptions) -> Turning | None:
    confined = getattr(parts, "confined", None) if options.refresh else None
    if confined is None:
        return None
    from atoll.strategies.inner.pipeline.turning import Turning

    return Turning(confined, own, every=options.refresh)


def _async_steps(parts: Any, own: LocalShard, options: InnerOptions) -> AsyncSteps:
    from atoll.strategies.inner.pipeline.async_steps import AsyncSteps

    return AsyncSteps(parts, own, clip=options.clip)
