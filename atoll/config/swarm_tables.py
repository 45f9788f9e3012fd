"""`[swarm]`: a model over members that each hold one stage, and its checks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from atoll.config.constraints import NotNegative, NotNegativeFloat, Positive, one_of
from atoll.config.island_tables import IslandTable
from atoll.errors import ConfigError
from atoll.ids import is_reducer, member_id, slot_of

if TYPE_CHECKING:
    from atoll.config.tables import JobSpec


SYNC = "sync"
"""Schedule of a SWARM whose steps follow each other."""
LOCAL = "local"
WHOLE_INNER = (LOCAL, "ddp", "fsdp", "tensor", "pipeline", "hybrid")
"""Inner strategies of members with the whole model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwarmTable:
    """`[swarm]`: the stages of a job with `inner = "swarm"`."""

    stages: NotNegative = 0
    """Stages that the model is cut into; each is served by one member or more. 0: no SWARM."""
    microbatches: Positive = 16
    """Parts of a step's rows (`batch` in `[train]`, of all members together) that are sent through
    the stages one by one."""
    schedule: Annotated[str, one_of("sync", "async")] = SYNC
    """`async`: the first `early` microbatches of a step are computed on the weights of the step
    before, while that one ends, so that no member waits for its rounds."""
    early: NotNegative = 0
    """Early microbatches of `schedule = "async"`, fewer than `microbatches`; 0: a quarter."""
    codec: str = "int8"
    """Format of activations and their gradients: a codec, e.g. `int8`, `subspace:K` (K numbers per
    token) or `subspace:K|int8`."""
    whole: NotNegative = 0
    """Number of members, the first ones, that hold the whole model and train it by themselves. They
    take part in the rounds of every stage with the others, which hold one stage each."""
    whole_inner: Annotated[str, one_of(*WHOLE_INNER)] = "local"
    """How each of those computes a step: `local` in one process, or an island of the ranks in
    `[island]`, whose first one meets the stages."""
    lost_stage: Annotated[str, one_of("wait", "neighbours")] = "wait"
    """When no member has a stage's state any more: `wait`: all stages go back to the newest
    checkpoint once a member is there for it; `neighbours`: it becomes the mean of the stages beside
    it, where their layers fit, without going back."""
    rebalance_s: NotNegativeFloat = 300.0
    """Seconds between two changes of places, from the fastest to the slowest stage; 0: never."""
    cuts: list[int] = dataclasses.field(default_factory=list)
    """Units before which the model is cut; `atoll run` balances what they compute. Empty: so that
    all stages have about as many weights to compute with."""
    needs_gb: list[float] = dataclasses.field(default_factory=list)
    """Memory in GB of a member of each stage, which `atoll run` predicts; empty: unknown."""

    @property
    def early_microbatches(self) -> int:
        """Microbatches of a step that are computed on the weights of the step before."""
        return 0 if self.schedule == SYNC else self.early or max(1, self.microbatches // 4)


PRESET, USUAL_STAGES = "swarm", 2
"""The preset of that name, and its stages if the job names none."""
TIED = ("gpt", "gpt2", "llama")
"""Models whose first and last layers share a weight unless `tie` is false."""


def with_swarm(spec: JobSpec, *, nodes_set: bool) -> JobSpec:
    """Return a job with what its stages imply; `nodes_set`: the file sets `nodes`.

    Stages cannot share a weight, so a model gets a head of its own. A SWARM needs a member for
    every stage, and has two for each unless the file says otherwise.
    """
    strategy, swarm, job, model = spec.strategy, spec.swarm, spec.job, spec.model
    if strategy.preset == PRESET and not swarm.stages and strategy.inner in ("", "swarm"):
        swarm = dataclasses.replace(swarm, stages=USUAL_STAGES)
    stages, least = swarm.stages, swarm.stages + swarm.whole
    if not stages:
        return spec
    if len(swarm.needs_gb) not in (0, stages):  # what `atoll run` found for other stages
        swarm = dataclasses.replace(swarm, cuts=[], needs_gb=[])
    strategy = dataclasses.replace(strategy, inner=strategy.inner or "swarm")
    if model.name in TIED and stages > 1:
        model = dataclasses.replace(model, options={"tie": False, **model.options})
    if not nodes_set:
        job = dataclasses.replace(job, nodes=2 * stages + swarm.whole, min_nodes=least)
    elif 0 < job.min_nodes < least <= job.nodes:
        job = dataclasses.replace(job, min_nodes=least)
    return dataclasses.replace(spec, strategy=strategy, swarm=swarm, job=job, model=model)


def member_spec(spec: JobSpec, member: str) -> JobSpec:
    """Return a job as one of its processes sees it: `[island]` is that of whole members only.

    Members with the whole model have `inner` of `whole_inner`; all others are one process.
    """
    swarm = spec.swarm
    if not swarm.stages or swarm.whole_inner == LOCAL:
        return spec
    if is_reducer(member) or slot_of(member) >= swarm.whole:
        stage = dataclasses.replace(swarm, whole_inner=LOCAL)
        return dataclasses.replace(spec, swarm=stage, island=IslandTable())
    strategy = dataclasses.replace(spec.strategy, inner=swarm.whole_inner)
    swarm = dataclasses.replace(swarm, whole_inner=LOCAL)
    return dataclasses.replace(spec, strategy=strategy, swarm=swarm)


def largest_member(spec: JobSpec) -> JobSpec:
    """Return a job as its first member sees it, which is an island if any member is one."""
    return member_spec(spec, member_id(0))


def check_whole(spec: JobSpec) -> None:
    """Check the members with the whole model, before their mesh is read; raises ConfigError."""
    island, swarm = spec.island, spec.swarm
    if not (swarm.stages and swarm.whole):
        if swarm.whole_inner != LOCAL:
            raise ConfigError(
                "whole_inner is for members with the whole model, and this job has none",
                given=f"whole_inner = {swarm.whole_inner!r}, whole = {swarm.whole} in [swarm]",
                remedy="whole = 1 in [swarm], or leave out whole_inner",
            )
        return
    if swarm.whole_inner == LOCAL:
        if island.ranks or island.mesh:
            raise ConfigError(
                "ranks in [island] do not say which members are islands",
                given=f"whole = {swarm.whole} in [swarm], ranks or mesh in [island]",
                expected="whole_inner in [swarm]: members with the whole model may be islands",
                remedy='whole_inner = "ddp" in [swarm], or no ranks in [island]',
            )
        return
    plain = IslandTable()
    for key in ("machines", "on_loss", "elastic", "memory"):
        value = getattr(island, key)
        if value != getattr(plain, key):
            raise ConfigError(
                f"{key} in [island] is not for islands beside a SWARM",
                given=f"{key} = {value!r}, whole_inner = {swarm.whole_inner!r}",
                expected="islands of one machine, which start again with all ranks, in memory",
                remedy=f"leave out {key} in [island]",
            )


def check_swarm(spec: JobSpec) -> None:
    """Check `[swarm]` and its inner strategy against the rest of a job; raises ConfigError."""
    stages, wanted = spec.swarm.stages, spec.strategy.inner == "swarm"
    if wanted != (stages > 0):
        raise ConfigError(
            "the stages of a SWARM and its inner strategy belong together",
            given=f"inner = {spec.strategy.inner!r} in [strategy], stages = {stages} in [swarm]",
            expected='inner = "swarm" with stages of 1 or more, or neither',
            remedy="set stages in [swarm]" if wanted else 'set inner = "swarm" in [strategy]',
        )
    if not wanted:
        return
    whole = spec.swarm.whole
    if stages > spec.job.nodes - whole:
        beside = f", whole = {whole}" if whole else ""
        raise ConfigError(
            "a SWARM needs a member for every stage",
            given=f"stages = {stages}{beside} in [swarm], nodes = {spec.job.nodes} in [job]",
            expected="as many members as stages, better twice as many"
            + (", besides those that hold the whole model" if whole else ""),
            remedy=f"nodes = {stages + whole}"
            + (f", or stages = {spec.job.nodes - whole}" if spec.job.nodes > whole else ""),
        )
    if whole and spec.meets_every_step:
        raise ConfigError(
            "members with the whole model meet the stages of a SWARM after several steps",
            given=f"whole = {whole} in [swarm], and an outer method that meets in every step",
            expected="an outer method that combines parameters",
            remedy='outer = "diloco" in [strategy], or whole = 0',
        )
    _check_schedule(spec)
    if spec.job.script or spec.job.command or spec.rl.active:
        raise ConfigError(
            "only the built-in trainer cuts a model into the stages of a SWARM",
            given=f"a job that runs a {'policy' if spec.rl.active else spec.kind}",
            expected="no script, command or [rl]",
            remedy='name = "module:factory" in [model] lets the trainer train a model of your own',
        )


def _check_schedule(spec: JobSpec) -> None:
    """Check the schedule and its early microbatches; raises ConfigError."""
    swarm = spec.swarm
    if swarm.schedule == SYNC:
        if swarm.early:
            raise ConfigError(
                "microbatches are early only in an asynchronous schedule",
                given=f'early = {swarm.early} and schedule = "sync" in [swarm]',
                remedy='schedule = "async", or leave out early',
            )
        return
    if not spec.meets_every_step:
        raise ConfigError(
            "an asynchronous SWARM needs members that agree on a gradient in every step",
            given='schedule = "async" in [swarm], and an outer method that combines parameters',
            expected="an outer method that meets in every step: others have no round to wait for",
            remedy='preset = "swarm", or schedule = "sync"',
        )
    if swarm.early_microbatches >= swarm.microbatches:
        raise ConfigError(
            "all microbatches of a step are early",
            given=f"early = {swarm.early_microbatches}, microbatches = {swarm.microbatches}",
            expected="fewer than all",
            remedy=f"early = {max(1, swarm.microbatches // 4)}, with 2 microbatches or more",
        )
