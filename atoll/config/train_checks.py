"""Validation of `[train]` and the mesh before anything starts."""

from __future__ import annotations

import re

from atoll.config.swarm_tables import largest_member
from atoll.config.tables import JobSpec
from atoll.errors import ConfigError, unknown

PLANNED = ("every", "collective", "codec", "delay")
"""Keys of `[strategy]` that may be planned again while a job runs."""
RECOMPUTE = ("none", "full", "matmul", "every:N")
"""Nothing; whole units; all of a unit except matrix products; every N-th unit."""


def check_train(spec: JobSpec) -> None:
    """Validate the options of the built-in trainer; raises ConfigError."""
    recomputed_every(spec.train.recompute)
    for key in spec.job.planned:
        if key not in PLANNED:
            raise unknown("key in planned of [job]", key, PLANNED)
    if spec.job.quorum and spec.meets_every_step:
        method = spec.strategy.outer or spec.strategy.preset
        raise ConfigError(
            "a quorum is for methods whose members train between rounds",
            given=f"quorum = {spec.job.quorum:g} with {method}",
            expected="a method with an outer step, e.g. diloco: a member that is left out has to "
            "take over the whole state, which costs more than one step",
            remedy="leave quorum out of [job]",
        )  # fmt: skip
    if spec.job.script or spec.job.command or spec.rl.active:
        return
    if spec.swarm.stages:
        check_rows(
            spec.train.batch, ranks=1, accumulate=spec.train.accumulate,
            microbatches=spec.swarm.microbatches,
        )  # fmt: skip
    island = largest_member(spec)
    check_rows(
        spec.train.batch, ranks=island.mesh.data, accumulate=spec.train.accumulate,
        microbatches=max(1, island.island.microbatches if island.mesh.pipeline > 1 else 0),
    )  # fmt: skip


def recomputed_every(word: str) -> int:
    """Return N if one in N units is recomputed; 0: none. Raises ConfigError."""
    fixed = {"none": 0, "full": 1, "matmul": 1}
    if word in fixed:
        return fixed[word]
    if found := re.fullmatch(r"every:([1-9]\d*)", word):
        return int(found[1])
    raise ConfigError(
        "unknown way to recompute", given=repr(word), expected="one of " + ", ".join(RECOMPUTE),
        remedy='recompute = "full" in [train] saves most',
    )  # fmt: skip


def check_rows(rows: int, *, ranks: int, accumulate: int, microbatches: int) -> None:
    """Raise ConfigError, with the nearest valid batch, if `rows` do not divide evenly.

    `rows` are those of the island's whole batch; `microbatches` are per accumulation step.
    """
    parts = ranks * accumulate * microbatches
    if rows and rows % parts == 0:
        return
    words = [f"{ranks} data ranks"] if ranks > 1 else []
    words += [f"accumulate = {accumulate}"] if accumulate > 1 else []
    words += [f"{microbatches} microbatches"] if microbatches > 1 else []
    below, above = rows // parts * parts, (rows // parts + 1) * parts
    raise ConfigError(
        "the rows of a batch cannot be split evenly",
        given=f"{rows} rows for {' x '.join(words) or 'one rank'}",
        expected=f"a multiple of {parts}",
        remedy=f"batch = {f'{below} or {above}' if below else above} in [train]",
    )
