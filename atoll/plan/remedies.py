"""Suggests the smallest change of a job that makes it fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.plan.memory import MemoryPlan, plan_memory

MOST_PARTS = 64
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """A suggested change and its effect."""

    words: str
    spec: JobSpec
    worst_bytes: int
    """Peak of any rank on its compute device after the change."""


def nearest_change(plan: MemoryPlan, *, limit_bytes: int, data: Any) -> Change | None:
    """Return the first of increasingly large changes that makes every rank fit, or None.

    First changes that only cost time (recomputation, half precision, smaller rows), alone and
    together; then more shards or ranks. `limit_bytes` is the memory of a rank's compute device.
    """
    for words, spec in _changes(plan, limit_bytes=limit_bytes):
        try:
            changed = plan_memory(spec, data=data)
        except ConfigError:
            continue  # e.g. the batch is not divisible
        if changed.worst_bytes <= limit_bytes:
            return Change(words, spec, changed.worst_bytes)
    return None


def _changes(plan: MemoryPlan, *, limit_bytes: int) -> Iterator[tuple[str, JobSpec]]:
    spec = plan.spec
    passing = max(rank.passing for rank in plan.ranks)
    # otherwise no change helps that keeps the weights per rank
    if plan.worst_bytes - passing <= limit_bytes:
        yield from _cheaper_steps(spec)
    for words, other in _more_shards(spec):
        yield words, other
        besides, cheaper = _cheapest(other)
        if besides:
            yield f"{words}, {besides}", cheaper


def _cheaper_steps(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    yield from _single(spec)
    together = _cheapest(spec)
    if together[0]:
        yield together


def _single(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    for words, changed in (_recompute(spec), _half(spec)):
        if words:
            yield words, changed
    yield from _smaller_rows(spec)


def _cheapest(spec: JobSpec) -> tuple[str, JobSpec]:
    """Return all changes of `_single` together; empty text if there is none."""
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
    if spec.train.precision not in ("auto", "fp32"):
        return "", spec
    train = replace(spec.train, precision="bf16")
    return 'precision = "bf16" in [train]', replace(spec, train=train)


def _smaller_rows(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    parts = spec.train.accumulate * 2
    while parts <= MOST_PARTS and spec.train.batch % (parts * spec.mesh.data) == 0:
        train = replace(spec.train, accumulate=parts)
        yield f"accumulate = {parts} in [train]", replace(spec, train=train)
        parts *= 2


def _smallest_rows(spec: JobSpec) -> tuple[str, JobSpec]:
    return next(reversed(list(_smaller_rows(spec))), ("", spec))


def _more_shards(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield jobs with more shards, first on the existing ranks."""
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
