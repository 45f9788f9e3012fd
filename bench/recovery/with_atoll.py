"""One member of an Atoll job: the same model in the same loop, under `atoll.join()`.

The job hands this script to its workers: FOLDER STEP_S EVERY as arguments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atoll
from atoll.strategies.wrapped_optimizer import OuterOptimizer
from bench.recovery.training import (
    OUTER_LR,
    OUTER_MOMENTUM,
    Notes,
    digest,
    load_lazy_parts,
    make_model,
    train,
)


def main(words: list[str]) -> None:
    """Be one member until the job is stopped."""
    folder, step_s, every = words
    notes = Notes(Path(folder), os.environ.get("ATOLL_MEMBER", "w0"))
    load_lazy_parts()
    notes.add("imports")
    with atoll.join() as run:
        notes.add("joined")
        model, optimizer = make_model(run.slot + 1)
        notes.add("built")
        outer = atoll.DiLoCo(every=int(every), outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM)
        wrapped = run.wrap(model, optimizer, outer=outer, codec="fp32")
        assert isinstance(wrapped, OuterOptimizer)
        notes.add("recovered", round=wrapped.task.round, digest=digest(model))
        train(
            model,
            wrapped,
            notes=notes,
            step_s=float(step_s),
            committed=lambda: wrapped.task.round,
            members=lambda: len(run.members),
            stopping=lambda: run.stopping,
            seed=run.slot,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
