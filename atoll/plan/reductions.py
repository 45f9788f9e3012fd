"""Measures the all-reduce of every pipeline that ranks can form: P stages of D replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from atoll.plan.measured import Measured, deal
from atoll.plan.timed import LARGE, SMALL, fitted, shortest
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.pipeline.hosts import Link

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


def reductions(
    measured: Measured, machine_of: Sequence[int], *, device: torch.device
) -> dict[int, dict[int, Link]]:
    """Return the all-reduce of the heaviest stage's gradient, by stages and replicas; collective.

    The groups of all stages reduce at one time, as at the end of a batch, each between ranks that
    are as far apart as replicas are; `machine_of` is the machine of every rank.
    """
    ranks = len(machine_of)
    machines = sorted(set(machine_of))
    found: dict[int, dict[int, Link]] = {}
    for stages in range(1, min(ranks // 2, len(measured.trained_bytes)) + 1):
        count = min(LARGE, max(_heaviest_bytes(measured, stages) // 4, 2 * SMALL))
        found[stages] = {}
        for replicas in range(2, ranks // stages + 1):
            counts = deal([list(machine_of).count(n) for n in machines], stages * replicas)
            acting = [
                rank
                for n, most in zip(machines, counts, strict=True)
                for rank in [r for r in range(ranks) if machine_of[r] == n][:most]
            ]
            groups = [acting[stage::stages] for stage in range(stages)]
            found[stages][replicas] = _reduction(groups, count, device)
    return found


def _heaviest_bytes(measured: Measured, stages: int) -> int:
    """Return the largest gradient of a stage, of stages that take as long as each other."""
    times = measured.sizes[sorted(measured.sizes)[len(measured.sizes) // 2]]
    costs = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    cuts = (0, *balanced(costs, stages=stages), len(costs))
    return max(sum(measured.trained_bytes[a:b]) for a, b in itertools.pairwise(cuts))


def _reduction(groups: Sequence[Sequence[int]], count: int, device: torch.device) -> Link:
    """Return the time of all-reduces of up to `count` values in all groups at one time."""
    mine = None
    for members in groups:
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = group
    times = [0.0, 0.0]
    for number, size in enumerate((SMALL, count)):
        dist.barrier()
        if mine is not None:
            values = torch.zeros(size, device=device)
            work = lambda values=values: dist.all_reduce(values, group=mine)  # noqa: E731
            times[number] = shortest(work, device)
    if mine is not None:
        dist.destroy_process_group(mine)
    dist.barrier()
    return fitted(times, count=count)
