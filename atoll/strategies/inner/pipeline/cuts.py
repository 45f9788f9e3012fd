"""Where a model is cut into stages of a pipeline: so that the slowest is as fast as can be.

Every rank has to cut alike: rank 0 measures and sends the others the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.strategies.inner.options import PipelineShape
from atoll.strategies.inner.precision import computing, widened

REPEATS = 3
"""Times that a unit is measured; the shortest counts."""


def balanced(costs: Sequence[float], *, stages: int) -> tuple[int, ...]:
    """Return the units before which to cut, so that the dearest stage costs least.

    Of several ways one with stages of like cost is taken; equal costs give equal cuts.

    Args:
        costs: Of each unit, 0 or more.
        stages: How many; at most one per unit.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: of the first n units in so many stages: (dearest, sum of squares, where it was cut)
    best: list[tuple[float, float, tuple[int, ...]]] = [(s, s * s, ()) for s in sums]
    for stage in range(2, stages + 1):
        best = [
            min(
                (
                    max(best[cut][0], sums[end] - sums[cut]),
                    best[cut][1] + (sums[end] - sums[cut]) ** 2,
                    (*best[cut][2], cut),
                )
                for cut in range(stage - 1, end)
            )
            if end >= stage
            else best[end]
            for end in range(len(sums))
        ]
    return best[-1][2]


def check_stages(units: int, shape: PipelineShape) -> None:
    """Refuse a pipeline with more stages than the model has units.

    Raises:
        ConfigError: it has; the message has the nearest that works.
    """
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


def check_cuts(cuts: Sequence[int], *, units: int, stages: int) -> tuple[int, ...]:
    """Return the cuts of a job file.

    Raises:
        ConfigError: they do not make so many stages of so many units.
    """
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
    """Return where a model is cut if nothing is measured and no one has said it: by weights."""
    return balanced(weights_of(units), stages=stages)


def weights_of(units: Sequence[nn.Module]) -> list[float]:
    """Return what units cost where nothing could be measured: as many as they have weights.

    Looking up an embedding costs next to nothing.
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
) -> list[float]:
    """Return the seconds that forward and backward pass of each unit take; the last has the loss.

    Units that are alike, with weights of the same shapes and inputs as well, take equally long:
    what was measured of one of them and not of another is chance.

    Units are on the device one at a time, and in main memory again afterwards. Neither gradients
    nor buffers nor random numbers are changed.

    Args:
        units: In the order of the forward pass.
        criterion: Mean loss of outputs and targets.
        inputs: Of a microbatch, (rows, ...).
        targets: What belongs to it.
        device: What to measure on.
        precision: What to compute in.
    """
    values: tuple[Tensor, ...] = (inputs.to(device),)
    targets = targets.to(device)
    found: list[float] = []
    kinds: list[object] = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        for number, unit in enumerate(units):
            last = number == len(units) - 1
            saved = {name: buffer.clone() for name, buffer in unit.named_buffers()}
            unit.to(device)

            def once(
                unit: nn.Module = unit, values: tuple[Tensor, ...] = values, last: bool = last
            ) -> tuple[Tensor, ...]:
                with computing(precision, device):
                    outputs = as_tuple(unit(*values))
                loss = (criterion(widened(outputs[0], precision), targets),) if last else outputs
                _pull(unit, values, loss)
                return outputs

            with torch.enable_grad():
                outputs = once()  # the first time is slower
                found.append(min(_timed(once, device) for _ in range(REPEATS)))
            kinds.append(number if last else _kind(unit, values, number))
            with torch.no_grad():
                for name, buffer in unit.named_buffers():
                    buffer.copy_(saved[name])
            unit.to("cpu")
            values = tuple(
                v.detach().requires_grad_(v.is_floating_point() and v.requires_grad)
                for v in outputs
            )
    least: dict[object, float] = {}
    for kind, seconds in zip(kinds, found, strict=True):
        least[kind] = min(seconds, least.get(kind, seconds))
    return [least[kind] for kind in kinds]


def _kind(unit: nn.Module, values: tuple[Tensor, ...], number: int) -> object:
    """Return what is equal for units that take equally long; unlike all others without weights."""
    weights = tuple((name, tuple(p.shape)) for name, p in unit.named_parameters())
    given = tuple((tuple(value.shape), value.dtype) for value in values)
    return (type(unit), weights, given) if weights else number


def as_tuple(values: Any) -> tuple[Tensor, ...]:
    """Return what a unit returned as what the next one takes."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _pull(unit: nn.Module, values: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Compute gradients and drop them."""
    sources = [v for v in (*values, *unit.parameters()) if v.requires_grad]
    ends = [o for o in outputs if o.requires_grad]
    if sources and ends:
        ones = [torch.ones_like(end) for end in ends]
        torch.autograd.grad(ends, sources, ones, allow_unused=True)


def _timed(once: Callable[[], object], device: torch.device) -> float:
    """Return how long something takes, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
