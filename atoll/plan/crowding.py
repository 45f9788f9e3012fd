"""How fast ranks compute while other ranks of their machine do.

Units are timed one by one, and the shortest time counts. A rank of a pipeline computes a stage of
several units, adds up gradients, and shares caches, cores and memory with the other ranks, and with
whatever else runs on the machine. So every rank gets the heaviest stage of an even pipeline, and
1, 2, ... ranks compute at one time, in turns, so that a change of load meets all of them.

Three ranks on two cores do not get two thirds of a core each: one has a core, and two share the
other one until it is done. So a rank that has been measured goes on computing until the others have
been; if it stopped, they would be measured with a core each.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed

from atoll.config import JobSpec, RankPlace
from atoll.devices.choose import CPU
from atoll.plan.measured import UnitTimes
from atoll.plan.memory import sample, sizes_of
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.pipeline.cuts import as_tuple
from atoll.strategies.inner.pipeline.stages import chain_of
from atoll.strategies.inner.precision import computing, precision_on
from atoll.train.build import whole_model

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

ROUNDS = 5
"""Measurements of each number of ranks; the median counts."""
BESIDE = 2.0
"""Passes that a rank computes after its measurement, while others may still be measuring."""
SPAN_S = 0.2
"""Shortest duration of each, by default."""


class Crowd:
    """A stage on every rank, to be computed by 1, 2, ... of the ranks of a machine at one time."""

    def __init__(
        self, spec: JobSpec, times: UnitTimes, *, rows: int, most: int, place: RankPlace,
        device: torch.device, stages: int = 0,
    ) -> None:  # fmt: skip
        """Build the stages; collective, as all methods.

        `times` are those of the units for so many `rows`, `most` is the largest number of ranks of
        a machine, `stages` are those of the pipeline (0: as many as ranks). One rank at a time
        builds a whole model, of which it keeps the stage.
        """
        self._place = place
        self._times: list[list[float]] = [[] for _ in range(most)]
        """By the number of others that compute."""
        for turn in range(most):
            if place.local_rank == turn:
                self._once, self._expected_s = _stage(
                    spec, times, rows=rows, stages=stages or most, device=device
                )
                self._once()
            dist.barrier()

    def measure(self, *, span_s: float = SPAN_S) -> None:
        """Measure every number of ranks once more, each for at least `span_s`.

        On a busy machine a process that has waited computes faster at first: spans should be as
        long as what is predicted.
        """
        for others, times in enumerate(self._times):
            dist.barrier()
            if self._place.local_rank <= others:
                times.append(seconds_beside(self._once, span_s=span_s))
        dist.barrier()

    def rates(self, *, last: int = 0) -> dict[int, tuple[float, ...]]:
        """Return the rates of every machine, by its number, of the `last` or all measurements.

        A rate is the time that the units of the stage should take, divided by the time they took.
        """
        mine = [
            self._expected_s / statistics.median(times[-last:]) if times else 0.0
            for times in self._times
        ]
        everyone: list[Any] = [None] * self._place.ranks
        dist.all_gather_object(everyone, (self._place.machine, mine))
        found: dict[int, tuple[float, ...]] = {}
        for machine in {machine for machine, _ in everyone}:
            rows_of = [rates for number, rates in everyone if number == machine]
            columns = ([rate for rate in column if rate] for column in zip(*rows_of, strict=True))
            found[machine] = tuple(statistics.fmean(column) for column in columns if column)
        return found


def measured_rates(
    spec: JobSpec, sizes: Mapping[int, UnitTimes], *, most: int, place: RankPlace,
    device: torch.device,
) -> dict[int, tuple[float, ...]]:  # fmt: skip
    """Return the rates of every machine; none where each rank has a device of its own."""
    if device.type != CPU:
        return {}
    rows = sorted(sizes)[len(sizes) // 2]
    crowd = Crowd(spec, sizes[rows], rows=rows, most=most, place=place, device=device)
    for _ in range(ROUNDS):
        crowd.measure()
    return crowd.rates()


def _stage(
    spec: JobSpec, times: UnitTimes, *, rows: int, stages: int, device: torch.device
) -> tuple[Callable[[], None], float]:
    """Return both passes of the heaviest of some stages, and the time of its units."""
    data = sizes_of(spec)
    model = whole_model(spec, data).train()
    units, _ = chain_of(model)
    costs = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    cuts = (0, *balanced(costs, stages=min(stages, len(units))), len(units))
    first, last = max(itertools.pairwise(cuts), key=lambda part: sum(costs[slice(*part)]))
    precision = precision_on(spec.train.precision, device)
    values = as_tuple(sample(data, model, rows=rows)[0])
    with torch.no_grad(), computing(precision, device):
        for unit in units[:first]:
            values = as_tuple(unit(*values))
    own = units[first:last]
    inputs = [v.detach().requires_grad_(v.is_floating_point()) for v in values]

    def once() -> None:
        outputs = tuple(inputs)
        with computing(precision, device):
            for unit in own:
                outputs = as_tuple(unit(*outputs))
        ends = [output for output in outputs if output.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])

    return once, sum(costs[first:last])


def seconds_beside(
    once: Callable[[], None], *, span_s: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the mean time of a pass, of as many as take `span_s`, beside others that do the same.

    Afterwards it computes `BESIDE` more passes: a rank of half the speed may still be measuring.
    """
    begun, count, spent_s = clock(), 0, 0.0
    while spent_s < span_s:
        once()
        count += 1
        spent_s = clock() - begun
    mean_s = spent_s / count
    while clock() - begun < spent_s + BESIDE * mean_s:
        once()
    return mean_s
