"""What `[train]` cannot mean together with a mesh, refused before anything starts."""

from __future__ import annotations

import re

from atoll.config.tables import JobSpec
from atoll.errors import ConfigError

RECOMPUTE = ("none", "full", "matmul", "every:N")
"""Nothing; whole units; all of a unit but its matrix products; every N-th unit as a whole."""


def check_train(spec: JobSpec) -> None:
    """Refuse words and numbers of the built-in trainer that cannot work.

    Raises:
        ConfigError: there is no such way to recompute, or a batch cannot be dealt out evenly.
    """
    recomputed_every(spec.train.recompute)
    if spec.job.script or spec.job.command or spec.rl.active:
        return
    microbatches = spec.island.microbatches if spec.mesh.pipeline > 1 else 0
    check_rows(
        spec.train.batch, ranks=spec.mesh.data, accumulate=spec.train.accumulate,
        microbatches=max(1, microbatches),
    )  # fmt: skip


def recomputed_every(word: str) -> int:
    """Return of how many units one is computed again; 0: of none.

    Raises:
        ConfigError: there is no such word.
    """
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
    """Raise if a batch of so many rows cannot be dealt out evenly.

    Args:
        rows: Of a batch of the whole island.
        ranks: That see different rows.
        accumulate: Parts of a rank's share.
        microbatches: Of a pipeline, in each such part.

    Raises:
        ConfigError: with the numbers and the nearest that work.
    """
    parts = ranks * accumulate * microbatches
    if rows and rows % parts == 0:
        return
    words = [f"{ranks} data ranks"] if ranks > 1 else []
    words += [f"accumulate = {accumulate}"] if accumulate > 1 else []
    words += [f"{microbatches} microbatches"] if microbatches > 1 else []
    below, above = rows // parts * parts, (rows // parts + 1) * parts
    raise ConfigError(
        "the rows of a batch cannot be dealt out evenly",
        given=f"{rows} rows for {' x '.join(words) or 'one rank'}",
        expected=f"a multiple of {parts}",
        remedy=f"batch = {f'{below} or {above}' if below else above} in [train]",
    )
