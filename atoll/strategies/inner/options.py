"""Options of inner strategies, and the schedules of a pipeline in closed form. No torch.

Legend: p ranks in a row, v stages on each of them (chunks), m microbatches of a batch, k a rank's
number from 0. Forward and backward of a microbatch on a stage take one unit of time each; transfers
take none. GPipe: Huang et al., https://arxiv.org/abs/1811.06965; 1F1B and interleaving: Narayanan
et al., https://arxiv.org/abs/2104.04473.

  schedule      idle share of a rank's time     most activations held
  gpipe         (p-1) / (m+p-1)                 m
  1f1b          (p-1) / (m+p-1)                 min(p-k, m)
  opportunistic (p-1) / (m+p-1), at most        min(2 (p-k), m), the last rank 1
  interleaved   (p-1) / (v m+p-1)               min((v-1) p + 2 (p-1-k) + 1, v m), each 1/v of a
                                                rank's layers
  async         0                               p-k

`opportunistic` is 1F1B that goes on with another pass while it would wait for a tensor; see
`pipeline/order.py`. `async` is 1F1B that does not end with a batch: the next one follows at once. A
rank then computes the first microbatches of a batch at weights that lack up to ceil((p-1-k) / m)
updates; (p-1-k) / m is the mean over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.config import IslandTable, JobSpec, MeshShape, largest_member
from atoll.errors import ConfigError, unknown


@dataclass(frozen=True, kw_only=True)
class InnerOptions:
    """How one member computes a step; see `IslandTable` and `TrainTable` for the values."""

    shape: MeshShape = field(default_factory=MeshShape)
    precision: str = "fp32"
    accumulate: int = 1
    recompute: str = "none"
    compile: bool = False
    clip: float = 0.0
    least_step_s: float = 0.0
    """A step takes at least so many seconds, as on a slower machine: see `config.least_step_s`."""
    reshard: bool = True
    offload: bool = False
    sequence: bool = False
    vocabulary: bool = True
    plan: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "1f1b"
    microbatches: int = 0
    chunks: int = 1
    cuts: tuple[int, ...] = ()
    activations: str = "none"
    refresh: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> InnerOptions:
        """Return the options of a job."""
        train, island = spec.train, spec.island
        return cls(
            shape=spec.mesh, precision=train.precision, accumulate=train.accumulate,
            recompute=train.recompute, compile=train.compile, clip=train.clip,
            reshard=island.reshard, offload=island.offload, sequence=island.sequence,
            vocabulary=island.vocabulary, plan=island.plan, schedule=island.schedule,
            microbatches=island.microbatches, chunks=island.chunks, cuts=tuple(island.cuts),
            activations=island.activations, refresh=island.refresh,
        )  # fmt: skip


GPIPE, ONE_EACH, INTERLEAVED, ASYNC = "gpipe", "1f1b", "interleaved", "async"
OPPORTUNISTIC = "opportunistic"
SCHEDULES = (GPIPE, ONE_EACH, OPPORTUNISTIC, INTERLEAVED, ASYNC)
WITHOUT_LEAST = (GPIPE, OPPORTUNISTIC, ASYNC)
"""Schedules that work with any number of microbatches."""

NONE, SUBSPACE = "none", "subspace:"


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The format of activations between stages, parsed."""

    size: int = 0
    """Dimensions of the subspace; 0: the whole space."""
    codec: str = ""
    """Spec of the codec; empty: none."""

    @classmethod
    def of(cls, spec: str) -> ActivationFormat:
        """Parse `none`, `subspace:K`, a codec or `subspace:K|CODEC`; raises ConfigError."""
        if spec == NONE:
            return cls()
        if not spec.startswith(SUBSPACE):
            return cls(codec=spec)
        size, _, codec = spec.removeprefix(SUBSPACE).partition("|")
        if not size.isdecimal() or not int(size):
            raise ConfigError(
                "a subspace without dimensions", given=f"activations = {spec!r}",
                expected='"subspace:K" with K of 1 or more', remedy='activations = "subspace:64"',
            )  # fmt: skip
        return cls(int(size), codec)


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A schedule and its ranks."""

    schedule: str
    ranks: int
    chunks: int = 1
    """Stages per rank."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise unknown("schedule of a pipeline", self.schedule, SCHEDULES)
        if self.chunks < 1 or (self.chunks > 1) != (self.schedule == INTERLEAVED):
            interleaved = self.schedule == INTERLEAVED
            raise ConfigError(
                f"schedule = {self.schedule!r} has another number of stages per rank",
                given=f"chunks = {self.chunks}",
                expected="2 or more" if interleaved else "1",
                remedy='chunks = 2 in [island], or schedule = "1f1b"'
                if interleaved
                else 'chunks = 1 in [island], or schedule = "interleaved"',
            )

    @property
    def stages(self) -> int:
        """Number of stages; stage s is on rank s % ranks."""
        return self.ranks * self.chunks

    def works_with(self, microbatches: int) -> bool:
        """Return whether the schedule exists for so many microbatches."""
        if self.schedule == INTERLEAVED:
            return microbatches >= 1 and microbatches % self.ranks == 0
        return microbatches >= (1 if self.schedule in WITHOUT_LEAST else self.ranks)

    def bubble(self, microbatches: int) -> float:
        """Return the idle share of a rank's time, 0..1; of `async` while it is not drained."""
        if self.schedule == ASYNC:
            return 0.0
        return (self.ranks - 1) / (self.chunks * microbatches + self.ranks - 1)

    def overhead(self, microbatches: int) -> float:
        """Return idle time relative to compute time."""
        if self.schedule == ASYNC:
            return 0.0
        return (self.ranks - 1) / (self.chunks * microbatches)

    def held(self, rank: int, *, microbatches: int) -> int:
        """Return the most inputs of stages that a rank keeps for backward passes."""
        if self.schedule == GPIPE:
            return microbatches
        if self.schedule == ONE_EACH:
            return min(self.ranks - rank, microbatches)
        if self.schedule == OPPORTUNISTIC:
            return min(2 * (self.ranks - rank), microbatches) if rank < self.ranks - 1 else 1
        if self.schedule == ASYNC:
            return self.ranks - rank
        return min(self._warm_up(rank, microbatches) + 1, microbatches * self.chunks)

    def delay(self, rank: int, *, microbatches: int) -> int:
        """Return the most updates that a rank's weights lack when it computes a gradient."""
        if self.schedule != ASYNC:
            return 0
        return -(-(self.ranks - 1 - rank) // microbatches)

    def order(self, rank: int, *, microbatches: int) -> list[Work]:
        """Return a rank's work in order; of `async` for all microbatches until it is drained.

        Of `opportunistic` it is the order in which it does what can begin.
        """
        if self.schedule == GPIPE:
            forward = [Work(True, rank, number) for number in range(microbatches)]
            return forward + [Work(False, rank, number) for number in range(microbatches)]
        if self.schedule in (ONE_EACH, OPPORTUNISTIC, ASYNC):
            first, backward_first = self.ranks - rank, True
        else:
            first, backward_first = self._warm_up(rank, microbatches), False
        steps = range(microbatches * self.chunks)
        forward = [self._work(rank, step, forward=True) for step in steps]
        backward = [self._work(rank, step, forward=False) for step in steps]
        first = min(first, len(steps))
        found, ahead = forward[:first], forward[first:]
        for number, work in enumerate(backward):
            pair = [work, *ahead[number : number + 1]]
            found += pair if backward_first else reversed(pair)
        return found

    def _warm_up(self, rank: int, microbatches: int) -> int:
        """Return the initial forward passes of a rank of an interleaved pipeline."""
        ahead = (self.chunks - 1) * self.ranks + 2 * (self.ranks - 1 - rank)
        return min(ahead, microbatches * self.chunks)

    def _work(self, rank: int, step: int, *, forward: bool) -> Work:
        """Return pass number `step` of a rank, forward or backward: p of each stage in turn."""
        turn, place = divmod(step, self.ranks)
        rounds, chunk = divmod(turn, self.chunks)
        chunk = chunk if forward else self.chunks - 1 - chunk
        return Work(forward, chunk * self.ranks + rank, rounds * self.ranks + place)


@dataclass(frozen=True, slots=True)
class Work:
    """A forward or backward pass of one microbatch through one stage."""

    forward: bool
    stage: int
    microbatch: int


PIPELINE_KEYS = ("schedule", "activations", "refresh", "microbatches", "chunks", "cuts")
"""Keys of `[island]` that only a pipeline reads."""


def check_island(spec: JobSpec) -> None:
    """Check what a job says of pipelines, as far as names and numbers tell.

    Raises:
        ConfigError: an option would be ignored, is unknown, or does not fit the mesh.
    """
    spec = largest_member(spec)
    options = InnerOptions.of(spec)
    if ActivationFormat.of(spec.swarm.codec).size and spec.swarm.whole:
        raise ConfigError(
            "members with the whole model would push the stages' weights out of their subspace",
            given=f"codec = {spec.swarm.codec!r}, whole = {spec.swarm.whole}",
            expected="a subspace for all members, or for none",
            remedy='codec = "int8" in [swarm], or whole = 0',
        )
    if options.shape.pipeline == 1 and not spec.island.elastic and spec.kind == "trainer":
        plain = IslandTable()
        for key in PIPELINE_KEYS:
            value = getattr(spec.island, key)
            if value != getattr(plain, key):
                raise _without_pipeline(key, value, spec)
        return
    PipelineShape(options.schedule, options.shape.pipeline, options.chunks)
    check_axes(options)
    if options.refresh:
        _check_refresh(options, spec)


def _check_refresh(options: InnerOptions, spec: JobSpec) -> None:
    """Check that a subspace can be turned; raises ConfigError."""
    given = f"refresh = {options.refresh} in [island]"
    if not ActivationFormat.of(options.activations).size:
        raise ConfigError(
            "there is no subspace to turn",
            given=f"{given}, activations = {options.activations!r}",
            expected='activations = "subspace:K"', remedy="leave out refresh",
        )  # fmt: skip
    if options.schedule == ASYNC:
        raise ConfigError(
            "the stages of an asynchronous pipeline step at different times",
            given=f'{given}, schedule = "async"', expected="a schedule that ends each batch",
            remedy='schedule = "1f1b", or leave out refresh',
        )  # fmt: skip
    if not spec.alone:
        raise ConfigError(
            "members whose subspaces turn by themselves cannot combine their weights",
            given=f"{given}, preset = {spec.strategy.preset!r}", expected='preset = "alone"',
            remedy="leave out refresh: then all members have the same subspace",
        )  # fmt: skip


def confined_to(spec: JobSpec) -> int:
    """Return the dimensions in which the stages of a job exchange activations; 0: all."""
    wanted = spec.swarm.codec if spec.swarm.stages else spec.island.activations
    return ActivationFormat.of(wanted).size


def _without_pipeline(key: str, value: object, spec: JobSpec) -> ConfigError:
    swarm = spec.strategy.inner == "swarm"
    own = {"activations": "codec", "microbatches": "microbatches"}.get(key)
    remedy = f'inner = "pipeline" in [strategy], or no {key} in [island]'
    if swarm:
        remedy = f"{own} in [swarm]" if own else f"no {key} in [island]"
    return ConfigError(
        f"{key} in [island] is an option of pipelines, and this job has none",
        given=f"{key} = {value!r} with inner = {spec.strategy.inner or 'local'!r}, "
        f"mesh {spec.mesh}",
        expected="2 stages or more in the mesh",
        remedy=remedy,
    )


def check_axes(options: InnerOptions) -> None:
    """Raise ConfigError if schedule or activations do not exist for the mesh or the precision."""
    shape = options.shape
    if options.schedule == ASYNC:
        if shape.shard * shape.tensor > 1:
            raise ConfigError(
                'schedule = "async" steps each stage by itself, on whole matrices',
                given=f"mesh {shape}", expected="ranks along pipeline and replicate only",
                remedy=f"mesh = {{pipeline = {shape.pipeline}, replicate = "
                f'{shape.ranks // shape.pipeline}}}; or schedule = "1f1b"',
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


def microbatches_of(shape: PipelineShape, *, wanted: int, rows: int) -> int:
    """Return the number of microbatches, without checking that the rows are a multiple.

    If `wanted` is 0: twice the ranks in a row, or the largest smaller number that divides the rows;
    of `async` four times, because the loss that delays cost falls with it. `rows` go through the
    pipeline at once.
    """
    if wanted:
        return wanted
    most = shape.ranks * (4 if shape.schedule == ASYNC else 2)
    able = [m for m in range(most, 0, -1) if shape.works_with(m)]
    return next((m for m in able if rows % m == 0), able[-1])


def check_microbatches(shape: PipelineShape, wanted: int) -> None:
    """Raise ConfigError, naming the nearest valid number, if the schedule does not exist for it."""
    if shape.works_with(wanted):
        return
    least = 1 if shape.schedule in WITHOUT_LEAST else shape.ranks
    step = shape.ranks if shape.schedule == INTERLEAVED else 1
    nearest = max(least, round(wanted / step) * step)
    raise ConfigError(
        f"schedule = {shape.schedule!r} cannot work with so many microbatches",
        given=f"microbatches = {wanted}, {shape.ranks} ranks in a row",
        expected=f"a multiple of {step}" if step > 1 else f"{least} or more",
        remedy=f"microbatches = {nearest} in [island]",
    )
