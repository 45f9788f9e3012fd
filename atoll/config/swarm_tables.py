"""`[swarm]`: a model over members that each hold one stage, and its checks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from atoll.config.constraints import NotNegative, NotNegativeFloat, Positive, one_of
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.config.tables import JobSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwarmTable:
    """`[swarm]`: the stages of a job with `inner = "swarm"`."""

    stages: NotNegative = 0
    """Stages that the model is cut into; each is served by one member or more. 0: no SWARM."""
    microbatches: Positive = 16
    """Parts of a step's rows (`batch` in `[train]`, of all members together) that are sent through
    the stages one by one."""
    codec: str = "int8"
    """Encoding of activations and their gradients."""
    lost_stage: Annotated[str, one_of("wait", "neighbours")] = "wait"
    """Without any member or checkpoint of a stage: `wait` for one, or go on with the mean of the
    `neighbours`."""
    rebalance_s: NotNegativeFloat = 300.0
    """Seconds between two changes of places, from the fastest to the slowest stage; 0: never."""


def check_swarm(spec: JobSpec) -> None:
    """Check that the job can train as a SWARM, if it wants to; raises ConfigError."""
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
    if stages > spec.job.nodes:
        raise ConfigError(
            "a SWARM needs a member for every stage",
            given=f"stages = {stages} in [swarm], nodes = {spec.job.nodes} in [job]",
            expected="as many members as stages, better twice as many",
            remedy=f"nodes = {stages}, or stages = {spec.job.nodes}",
        )
    if spec.job.script or spec.job.command or spec.rl.active:
        raise ConfigError(
            "only the built-in trainer cuts a model into the stages of a SWARM",
            given=f"a job that runs a {'policy' if spec.rl.active else spec.kind}",
            expected="no script, command or [rl]",
            remedy='name = "module:factory" in [model] lets the trainer train a model of your own',
        )
