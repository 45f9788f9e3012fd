"""Cuts of a model into pipeline stages that minimize the time of the slowest stage.

All ranks have to use the same cuts: rank 0 measures and broadcasts the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.devices.choose import CPU
from atoll.devices.runtime import synchronize
from atoll.errors import ConfigError
from atoll.strategies.inner.options import (
    ASYNC,
    ActivationFormat,
    InnerOptions,
    PipelineShape,
)
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.precision import computing, widened

REPEATS = 3
"""Measurements per unit; the shortest counts."""


@dataclass(frozen=True, slots=True)
class UnitTime:
    """What a unit costs for one microbatch; the last unit includes the loss."""

    forward_s: float
    backward_s: float
    sent_bytes: int
    """Of its outputs."""

    @property
    def total_s(self) -> float:
        """Forward and backward pass."""
        return self.forward_s + self.backward_s


def check_stages(units: int, shape: PipelineShape) -> None:
    """Raise ConfigError, naming the nearest valid option, for more stages than units."""
    if shape.stages <= units:
        return
    chunks = units // shape.ranks
    nearest = f"mesh = {{pipeline = {units}}}" if units > 1 else 'inner = "ddp"'
    if chunks >= 1:
        nearest = f"chunks = {chunks}" if chunks > 1 else 'schedule = "1f1b" and chunks = 1'
    raise ConfigError(
        "a pipeline with more stages than the model has units",
        given=f"{shape.ranks} ranks x {shape.chunks} chunks = {shape.stages} stages, {units} units",
        expected=f"at most {units} stages",
        remedy=nearest,
    )


def check_axes(options: InnerOptions) -> None:
    """Raise ConfigError if schedule or activations do not exist for the mesh or the precision."""
    shape = options.shape
    if options.schedule == ASYNC:
        if shape.ranks > shape.pipeline:
            raise ConfigError(
                'schedule = "async" steps each stage by itself, without other axes',
                given=f"mesh {shape}", expected="ranks along pipeline only",
                remedy=f"mesh = {{pipeline = {shape.ranks}}}; or more members with an outer "
                'method; or schedule = "1f1b"',
            )  # fmt: skip
        if options.precision == "fp16":
            raise ConfigError(
                'schedule = "async" has no common scale of the loss', given='precision = "fp16"',
                expected="fp32 or bf16", remedy='precision = "bf16" in [train]',
            )  # fmt: skip
    form = ActivationFormat.of(options.activations)
    if form.size and shape.tensor * shape.shard > 1:
        raise ConfigError(
            "a subspace needs whole matrices on each stage", given=f"mesh {shape}",
            expected="ranks along pipeline and replicate only",
            remedy='mesh = {pipeline = N}, or activations = "int8" in [island]',
        )  # fmt: skip


def check_ties(ties: Mapping[str, Sequence[int]], shape: PipelineShape) -> None:
    """Raise ConfigError if stages that step by themselves share weights."""
    if ties and shape.schedule == ASYNC:
        raise ConfigError(
            'schedule = "async" steps each stage by itself, and two stages share a weight',
            given=", ".join(f"{name} on stages {stages}" for name, stages in ties.items()),
            expected="stages without common weights",
            remedy='tie = false in [model], or schedule = "1f1b" in [island]',
        )


def check_cuts(cuts: Sequence[int], *, units: int, stages: int) -> tuple[int, ...]:
    """Return the cuts of a job file, or raise ConfigError if they do not make that many stages."""
    good = all(a < b for a, b in zip((0, *cuts), (*cuts, units), strict=True))
    if good and len(cuts) == stages - 1:
        return tuple(cuts)
    even = [round(units * stage / stages) for stage in range(1, stages)]
    raise ConfigError(
        "the cuts do not make the stages", given=f"cuts = {list(cuts)}, {units} units",
        expected=f"{stages - 1} rising numbers of 1 to {units - 1}, for {stages} stages",
        remedy=f"cuts = {even} in [island], or none to have them balanced",
    )  # fmt: skip


def cuts_by_size(units: Sequence[nn.Module], *, stages: int) -> tuple[int, ...]:
    """Return cuts by the number of weights, for a model that is not measured."""
    return balanced(weights_of(units), stages=stages)


def weights_of(units: Sequence[nn.Module]) -> list[float]:
    """Return the cost of units that are not measured: their number of weights.

    An embedding costs nearly nothing.
    """
    return [
        1.0
        + sum(
            parameter.numel()
            for module in unit.modules()
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        )
        for unit in units
    ]


def profile(
    units: Sequence[nn.Module],
    criterion: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    device: torch.device,
    precision: str = "fp32",
) -> list[UnitTime]:
    """Return the seconds of forward and backward pass of each unit.

    Units of the same type, with weights and inputs of the same shapes, get their minimum, because
    differences between them are noise. Units, in forward order, are moved to the device one at a
    time, and back to main memory. Gradients, buffers and the random state are unchanged. `inputs`,
    (rows, ...), and `targets` are one microbatch.
    """
    values: tuple[Tensor, ...] = (inputs.to(device),)
    targets = targets.to(device)
    found: list[UnitTime] = []
    kinds: list[object] = []
    devices = [] if device.type == CPU else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        for number, unit in enumerate(units):
            last = number == len(units) - 1
            saved = {name: buffer.clone() for name, buffer in unit.named_buffers()}
            unit.to(device)

            def once(
                unit: nn.Module = unit, values: tuple[Tensor, ...] = values, last: bool = last
            ) -> tuple[float, float, tuple[Tensor, ...]]:
                begun = _now(device)
                with computing(precision, device):
                    outputs = as_tuple(unit(*values))
                loss = (criterion(widened(outputs[0], precision), targets),) if last else outputs
                halfway = _now(device)
                _pull(unit, values, loss)
                return halfway - begun, _now(device) - halfway, outputs

            with torch.enable_grad():
                outputs = once()[2]  # warm-up
                times = min((once()[:2] for _ in range(REPEATS)), key=sum)
            found.append(UnitTime(*times, sent_bytes=sum(v.nbytes for v in outputs)))
            kinds.append(number if last else _kind(unit, values, number))
            with torch.no_grad():
                for name, buffer in unit.named_buffers():
                    buffer.copy_(saved[name])
            unit.to("cpu")
            values = tuple(
                v.detach().requires_grad_(v.is_floating_point() and v.requires_grad)
                for v in outputs
            )
    least: dict[object, UnitTime] = {}
    for kind, one in zip(kinds, found, strict=True):
        least[kind] = min(one, least.get(kind, one), key=lambda one: one.total_s)
    return [least[kind] for kind in kinds]


def _kind(unit: nn.Module, values: tuple[Tensor, ...], number: int) -> object:
    """Return a key that is equal for units of equal cost; unique for units without weights."""
    weights = tuple((name, tuple(p.shape)) for name, p in unit.named_parameters())
    given = tuple((tuple(value.shape), value.dtype) for value in values)
    return (type(unit), weights, given) if weights else number


def as_tuple(values: Any) -> tuple[Tensor, ...]:
    """Return a unit's outputs as the next one's inputs."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _pull(unit: nn.Module, values: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    sources = [v for v in (*values, *unit.parameters()) if v.requires_grad]
    ends = [o for o in outputs if o.requires_grad]
    if sources and ends:
        ones = [torch.ones_like(end) for end in ends]
        torch.autograd.grad(ends, sources, ones, allow_unused=True)


def _now(device: torch.device) -> float:
    """Return the time in seconds, after all queued work of the device."""
    synchronize(device)
    return time.perf_counter()
