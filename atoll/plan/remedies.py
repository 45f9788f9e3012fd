"""The nearest change of a job that makes it fit into the memory there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.plan.memory import MemoryPlan, plan_memory

MOST_PARTS = 64
"""Parts that a rank's rows are tried to be computed in, one after the other."""
MOST_RANKS = 64
"""Shards that are tried."""


@dataclass(frozen=True, slots=True)
class Change:
    """What to write instead, and what comes of it."""

    words: str
    """As in a job file."""
    spec: JobSpec
    worst_bytes: int
    """The most that any rank needs then, where it computes."""


def nearest_change(plan: MemoryPlan, *, limit_bytes: int, data: Any) -> Change | None:
    """Return the first of ever larger changes with which every rank fits; None: none does.

    First what costs time only (recomputation, half precision, smaller rows), each alone and then
    all together; then what takes other or more ranks.

    Args:
        plan: Of the job as it is.
        limit_bytes: What a rank may take where it computes.
        data: What it trains on, if the model's size depends on it.
    """
    for words, spec in _changes(plan, limit_bytes=limit_bytes):
        try:
            changed = plan_memory(spec, data=data)
        except ConfigError:
            continue  # e.g. the rows do not divide by so many
        if changed.worst_bytes <= limit_bytes:
            return Change(words, spec, changed.worst_bytes)
    return None


def _changes(plan: MemoryPlan, *, limit_bytes: int) -> Iterator[tuple[str, JobSpec]]:
    """Yield changes from the smallest on."""
    spec = plan.spec
    passing = max(rank.passing for rank in plan.ranks)
    if plan.worst_bytes - passing <= limit_bytes:  # else nothing helps that leaves weights as is
        yield from _cheaper_steps(spec)
    for words, other in _more_shards(spec):
        yield words, other
        besides, cheaper = _cheapest(other)
        if besides:
            yield f"{words}, {besides}", cheaper


def _cheaper_steps(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield changes that leave all ranks as they are."""
    yield from _single(spec)
    together = _cheapest(spec)
    if together[0]:
        yield together


def _single(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield changes of a step, one at a time."""
    for words, changed in (_recompute(spec), _half(spec)):
        if words:
            yield words, changed
    yield from _smaller_rows(spec)


def _cheapest(spec: JobSpec) -> tuple[str, JobSpec]:
    """Return all changes of a step at once; no words where there is none."""
    said = []
    for change in (_recompute, _half, _smallest_rows):
        words, spec = change(spec)
        said.append(words)
    return ", ".join(filter(None, said)), spec


def _recompute(spec: JobSpec) -> tuple[str, JobSpec]:
    if spec.train.recompute == "full":
        return "", spec
    train = replace(spec.train, recompute="full")
    return 'recompute = "full" in [train]', replace(spec, train=train)


def _half(spec: JobSpec) -> tuple[str, JobSpec]:
    if spec.train.precision != "fp32":
        return "", spec
    train = replace(spec.train, precision="bf16")
    return 'precision = "bf16" in [train]', replace(spec, train=train)


def _smaller_rows(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield jobs whose rows go through the model in more parts."""
    parts = spec.train.accumulate * 2
    while parts <= MOST_PARTS and spec.train.batch % (parts * spec.mesh.data) == 0:
        train = replace(spec.train, accumulate=parts)
        yield f"accumulate = {parts} in [train]", replace(spec, train=train)
        parts *= 2


def _smallest_rows(spec: JobSpec) -> tuple[str, JobSpec]:
    return next(reversed(list(_smaller_rows(spec))), ("", spec))


def _more_shards(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield jobs whose weights lie on more ranks: first on those that there are."""
    shape = spec.mesh
    shards = shape.shard * shape.replicate if shape.replicate > 1 else 2 * shape.shard
    while shards * shape.pipeline * shape.tensor <= MOST_RANKS:
        sizes = {"shard": shards, "pipeline": shape.pipeline, "tensor": shape.tensor}
        mesh = {axis: size for axis, size in sizes.items() if size > 1}
        if len(mesh) == 1:
            words = f'inner = "fsdp" in [strategy] and ranks = {shards} in [island]'
            inner, island = "fsdp", replace(spec.island, ranks=shards, mesh={})
        else:
            table = ", ".join(f"{axis} = {size}" for axis, size in mesh.items())
            words = f'inner = "hybrid" in [strategy] and mesh = {{ {table} }} in [island]'
            inner, island = "hybrid", replace(spec.island, ranks=0, mesh=mesh)
        strategy = replace(spec.strategy, inner=inner)
        yield words, replace(spec, strategy=strategy, island=island)
        shards *= 2
