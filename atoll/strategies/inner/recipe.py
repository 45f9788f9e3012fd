"""What an inner strategy is to do: numbers and words of a job file, in one value. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.config import JobSpec, MeshShape


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one member computes a step; see `IslandTable` and `TrainTable` for the words."""

    shape: MeshShape = field(default_factory=MeshShape)
    precision: str = "fp32"
    accumulate: int = 1
    recompute: str = "none"
    compile: bool = False
    clip: float = 0.0
    reshard: bool = True
    offload: bool = False
    sequence: bool = False
    vocabulary: bool = True
    plan: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "1f1b"
    microbatches: int = 0
    chunks: int = 1
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec) -> Recipe:
        """Return the recipe of a job."""
        train, island = spec.train, spec.island
        return cls(
            shape=spec.mesh, precision=train.precision, accumulate=train.accumulate,
            recompute=train.recompute, compile=train.compile, clip=train.clip,
            reshard=island.reshard, offload=island.offload, sequence=island.sequence,
            vocabulary=island.vocabulary, plan=island.plan, schedule=island.schedule,
            microbatches=island.microbatches, chunks=island.chunks, cuts=tuple(island.cuts),
        )  # fmt: skip
