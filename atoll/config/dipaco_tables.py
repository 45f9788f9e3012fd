"""`[dipaco]`: a model in levels of modules, of which each path takes one per level; its checks."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated

from atoll.config.constraints import Positive, one_of
from atoll.config.swarm_tables import TIED
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.config.tables import JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiPaCoTable:
    """`[dipaco]`: the paths of a job with `inner = "paths"`."""

    modules: list[int] = dataclasses.field(default_factory=list)
    """Modules of each level that the model is cut into, e.g. `[2, 2]`: a path takes one of each, so
    these are 4 paths. With fewer members than paths each trains several by turns."""
    copies: Positive = 1
    """Paths with the same modules, each with its own documents. `modules = [1]` with as many copies
    as members is plain DiLoCo."""
    assignment: str = ""
    """File that says which documents belong to which path, of `atoll paths shard`; it is sent with
    the job (`sha256:HEX`). Empty: blocks are dealt evenly."""
    start: str = ""
    """File with the weights that all paths begin with: the `model.safetensors` of a job with the
    same `[model]`, at the same place on every node; empty: those of the seed."""
    held_out: float = 0.02
    """Share of each path's documents on which it is not trained: a path ends as it was when their
    loss was least (early stopping). 0: no share, and paths end as they are after the last round."""
    weights: Annotated[str, one_of("shard", "tokens")] = "shard"
    """Weight of a path in the mean of a module: the tokens of its `shard`, as in the paper, or only
    the `tokens` that it has trained since the last round."""
    rescale: Annotated[str, one_of("none", "sqrt")] = "none"
    """Factor of a module's outer gradient: 1, or the root of the number of paths through it."""

    @property
    def paths(self) -> int:
        """Number of paths; 0: the model has none."""
        return math.prod(self.modules) * self.copies if self.modules else 0


PRESET, USUAL_MODULES = "dipaco", (2, 2)
"""The preset of that name, and its modules if the job names none."""
INNER = "paths"
"""`inner` of such a job."""


def with_paths(spec: JobSpec, *, nodes_set: bool) -> JobSpec:
    """Return a job with what its paths imply; `nodes_set`: the file sets `nodes`.

    Levels cannot share a weight, so a model gets a head of its own. There is a member for each
    path unless the file says otherwise, and one is enough.
    """
    strategy, dipaco, job, model = spec.strategy, spec.dipaco, spec.job, spec.model
    if strategy.preset == PRESET and not dipaco.modules and strategy.inner in ("", INNER):
        dipaco = dataclasses.replace(dipaco, modules=list(USUAL_MODULES))
    if not dipaco.modules:
        return spec
    strategy = dataclasses.replace(strategy, inner=strategy.inner or INNER)
    if model.name in TIED and len(dipaco.modules) > 1:
        model = dataclasses.replace(model, options={"tie": False, **model.options})
    if not nodes_set and min(dipaco.modules) > 0:
        job = dataclasses.replace(job, nodes=dipaco.paths, min_nodes=1)
    return dataclasses.replace(spec, strategy=strategy, dipaco=dipaco, job=job, model=model)


def check_paths(spec: JobSpec) -> None:
    """Check `[dipaco]` and its inner strategy against the rest of a job; raises ConfigError."""
    dipaco, wanted = spec.dipaco, spec.strategy.inner == INNER
    if wanted != bool(dipaco.modules):
        raise ConfigError(
            "the modules of a model with paths and its inner strategy belong together",
            given=f"inner = {spec.strategy.inner!r} in [strategy], modules = {dipaco.modules} in "
            "[dipaco]",
            expected='inner = "paths" with modules of one level or more, or neither',
            remedy="set modules in [dipaco]"
            if wanted
            else "leave out modules, or what sets inner: itself, stages in [swarm], a preset",
        )
    if not wanted:
        return
    if min(dipaco.modules) < 1:
        raise ConfigError(
            "every level of a model with paths has a module or more",
            given=f"modules = {dipaco.modules} in [dipaco]",
            expected="a number of 1 or more for each level",
            remedy=f"modules = {[max(1, count) for count in dipaco.modules]}",
        )
    if spec.job.nodes > dipaco.paths:
        raise ConfigError(
            "more members than paths: some would have nothing to train",
            given=f"nodes = {spec.job.nodes} in [job], modules = {dipaco.modules} in [dipaco]",
            expected=f"1 to {dipaco.paths} members; with fewer each trains several paths by turns",
            remedy=f"nodes = {dipaco.paths}, or more modules or copies",
        )
    if not 0 <= dipaco.held_out <= MOST_HELD_OUT:
        raise ConfigError(
            "held_out in [dipaco] is out of range",
            given=dipaco.held_out, expected=f"a share between 0 and {MOST_HELD_OUT}",
        )  # fmt: skip
    if spec.job.script or spec.job.command or spec.rl.active:
        raise ConfigError(
            "only the built-in trainer cuts a model into the levels of paths",
            given=f"a job that runs a {'policy' if spec.rl.active else spec.kind}",
            expected="no script, command or [rl]",
            remedy='name = "module:factory" in [model] lets the trainer train a model of your own',
        )
    _check_outer(spec)


MOST_HELD_OUT = 0.5


def _check_outer(spec: JobSpec) -> None:
    """Refuse outer methods, and options of theirs, that paths do not have."""
    if spec.meets_every_step:
        raise ConfigError(
            "the paths through a module meet after several steps",
            given="an outer method that combines the gradients of every step",
            expected="an outer method that combines parameters",
            remedy='preset = "dipaco", or outer = "diloco" or "average" in [strategy]',
        )
    options = spec.strategy.options
    if options.get("drop"):
        raise ConfigError(
            "a path whose update is dropped could not go on from its own parameters",
            given=f"drop = {options['drop']} in [strategy]", expected="drop = 0",
            remedy="leave drop out: lost members drop updates already",
        )  # fmt: skip
    if options.get("weight", "tokens") != "tokens":
        raise ConfigError(
            "the weight of a path is set in [dipaco]",
            given=f"weight = {options['weight']!r} in [strategy]",
            expected='weights = "shard" or "tokens" in [dipaco]', remedy="leave weight out",
        )  # fmt: skip
    if spec.train.precision == "fp16":
        raise ConfigError(
            "paths have no common loss scale, which fp16 needs",
            given='precision = "fp16" in [train]', expected="bf16 or fp32",
            remedy='precision = "bf16" in [train]',
        )  # fmt: skip
