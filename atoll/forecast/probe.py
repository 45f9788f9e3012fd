"""Seconds of one optimizer step of a job on this machine: real steps, for a bounded time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from atoll.config import JobSpec
from atoll.errors import ConfigError

WARM_STEPS = 2
"""First steps, which allocate and compile."""
FEWEST_STEPS, MOST_STEPS = 3, 500


def measure_step(
    spec: JobSpec, *, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median seconds of a step of this job, alone, where jobs compute on this machine.

    Takes about `seconds` after the start, or five steps. The model really trains; nothing is kept.

    Raises:
        ConfigError: the job is not one of the built-in trainer, or names what does not exist.
        DataError: its data are missing.
    """
    if spec.kind != "trainer" or spec.swarm.stages or spec.dipaco.modules:
        raise ConfigError(
            "the step of this job cannot be measured", given=f"a job of kind {spec.kind!r}",
            expected="a job of the built-in trainer whose members hold the whole model",
            remedy="write step_s into the file of machines by hand",
        )  # fmt: skip
    from atoll.codec.registry import make_codec
    from atoll.devices.choose import choose
    from atoll.devices.runtime import synchronize
    from atoll.group.single import SingleGroup
    from atoll.strategies.inner.local import Local, language_model_loss
    from atoll.train.batches import MemberStream
    from atoll.train.build import build
    from atoll.train.computing import options_on
    from atoll.train.optim.lazy_compiler import leave_out_compiler

    leave_out_compiler()
    # The method's own work between steps is not part of a step: a member by itself has none.
    alone = dataclasses.replace(
        spec.strategy, preset="alone", outer="", codec="fp32", collective="auto",
        aggregate="mean", options={"every": MOST_STEPS + WARM_STEPS + 1},
    )  # fmt: skip
    spec = dataclasses.replace(spec, strategy=alone)
    device = choose(spec.job.device)
    built = build(spec, member="w0", slot=0, num_slots=1, device=device)
    built.outer.setup(built.task, group=SingleGroup(), codec=make_codec("fp32"))
    built.outer.begin(built.task)
    options = options_on(spec, device)
    inner = Local(language_model_loss, clip=options.clip, options=options)
    inner.prepare(built.model)
    stream = MemberStream(built.shards, slot=0, batch=spec.train.batch)
    durations: list[float] = []
    deadline = clock() + seconds
    while len(durations) < MOST_STEPS and (
        len(durations) < WARM_STEPS + FEWEST_STEPS or clock() < deadline
    ):
        begun = clock()
        inner.step(built.task, next(stream), built.outer)
        synchronize(device)
        durations.append(clock() - begun)
    return statistics.median(durations[WARM_STEPS:])
