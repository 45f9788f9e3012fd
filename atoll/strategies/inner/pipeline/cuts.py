"""Cuts of a model into pipeline stages that minimize the time of the slowest stage.

All ranks have to use the same cuts: rank 0 measures and broadcasts the result.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.devices.choose import CPU
from atoll.devices.runtime import synchronize
from atoll.errors import ConfigError
from atoll.strategies.inner.options import ASYNC, PipelineShape
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.precision import computing, widened

REPEATS = 3
"""Measurements per unit; the median counts, also over units that are alike."""


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


def check_ties(ties: Mapping[str, Sequence[int]], shape: PipelineShape) -> None:
    """Raise ConfigError if stages that step by themselves share weights."""
    if ties and shape.schedule == ASYNC:
        raise ConfigError(
            'schedule = "async" steps each stage by itself, and two stages share a weight',
            given=", ".join(f"{name} on stages {stages}" for name, stages in ties.items()),
            expected="stages without common weights",
            remedy='tie = false in [model], or schedule = "1f1b" in [island]',
        )


def check_cuts(
    cuts: Sequence[int], *, units: int, stages: int, table: str = "island"
) -> tuple[int, ...]:
    """Return the cuts in a table of a job file, or raise ConfigError if they make other stages."""
    good = all(a < b for a, b in zip((0, *cuts), (*cuts, units), strict=True))
    if good and len(cuts) == stages - 1:
        return tuple(cuts)
    even = [round(units * stage / stages) for stage in range(1, stages)]
    raise ConfigError(
        "the cuts do not make the stages", given=f"cuts = {list(cuts)}, {units} units",
        expected=f"{stages - 1} rising numbers of 1 to {units - 1}, for {stages} stages",
        remedy=f"cuts = {even} in [{table}], or none to have them balanced",
    )  # fmt: skip


def cuts_by_size(units: Sequence[nn.Module], *, stages: int) -> tuple[int, ...]:
    """Return cuts by the number of weights, for a model that is not measured."""
    return cuts_by_cost(units, weights_of(units), stages=stages)


def cuts_by_cost(
    units: Sequence[nn.Module], costs: Sequence[float], *, stages: int,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:  # fmt: skip
    """Return cuts by the costs of the units; `speeds` of the stages divide them.

    Every stage gets a unit with weights, if there are enough: an optimizer without any is refused.
    """
    starts = trained_units(units)
    if len(starts) < stages:
        return balanced(costs, stages=stages, speeds=speeds)
    edges = [0, *starts[1:], len(units)]
    groups = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
    return tuple(starts[cut] for cut in balanced(groups, stages=stages, speeds=speeds))


def trained_units(units: Sequence[nn.Module]) -> list[int]:
    """Return the numbers of the units with trained weights."""
    return [n for n, unit in enumerate(units) if any(p.requires_grad for p in unit.parameters())]


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
    repeats: int = REPEATS,
) -> list[UnitTime]:
    """Return the seconds of forward and backward pass of each unit.

    Units of the same type, with weights and inputs of the same shapes, get their median, because
    differences between them are noise. (The minimum would favour whichever size of microbatches
    once had the caches to itself.) Units, in forward order, are moved to the device one at a time,
    and back to main memory. Gradients, buffers and the random state are unchanged. `inputs`,
    (rows, ...), and `targets` are one microbatch.
    """
    values: tuple[Tensor, ...] = (inputs.to(device),)
    targets = targets.to(device)
    sent: list[int] = []
    kinds: list[object] = []
    durations: dict[object, list[tuple[float, float]]] = {}
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
                times = [once()[:2] for _ in range(repeats)]
            kinds.append(number if last else _kind(unit, values, number))
            durations.setdefault(kinds[-1], []).extend(times)
            sent.append(sum(v.nbytes for v in outputs))
            with torch.no_grad():
                for name, buffer in unit.named_buffers():
                    buffer.copy_(saved[name])
            unit.to("cpu")
            values = tuple(
                v.detach().requires_grad_(v.is_floating_point() and v.requires_grad)
                for v in outputs
            )
    forward_s = {kind: statistics.median(f for f, _ in times) for kind, times in durations.items()}
    backward_s = {kind: statistics.median(b for _, b in times) for kind, times in durations.items()}
    return [
        UnitTime(forward_s[kind], backward_s[kind], nbytes)
        for kind, nbytes in zip(kinds, sent, strict=True)
    ]


def _kind(unit: nn.Module, values: tuple[Tensor, ...], number: int) -> object:
    """Return a key that is equal for units of equal cost; unique for units without weights."""
    weights = tuple((name, tuple(p.shape)) for name, p in unit.named_parameters())
    shapes = tuple((tuple(value.shape), value.dtype) for value in values)
    return (type(unit), weights, shapes) if weights else number


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
    """Return the time in seconds, after all queued work of the device.

    It is processor time where one thread computes: on a busy machine a long pass is interrupted, so
    that wall time would include other programs.
    """
    synchronize(device)
    alone = device.type == CPU and torch.get_num_threads() == 1
    return time.thread_time() if alone else time.perf_counter()
