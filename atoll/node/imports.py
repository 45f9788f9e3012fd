"""Loads large packages without pauses, and without looking at them ever again.

What a package defines is no garbage, but Python's collector walks over all of it several times
while torch is loaded, and at every full collection of the training that follows. Without that a
worker is ready 0.2 s of processor time earlier (of 1.9, `python -m bench.startup`).
"""

from __future__ import annotations

import gc
import importlib

from atoll.config import JobSpec, RankPlace


def modules_of_rank(spec: JobSpec, place: RankPlace | None) -> list[str]:
    """Return what a rank of an island loads besides the trainer; a member by itself nothing.

    DDP, FSDP and pipelines load torch's compiler, whether anything is compiled or not.
    """
    if place is None:
        return []
    compiler = ["torch._dynamo"] if spec.mesh.ranks > spec.mesh.tensor else []
    return [*compiler, "atoll.train.island.island_trainer"]


def load(*names: str) -> None:
    """Import modules that are about to be used.

    What is there at the end counts as needed for as long as the process lives.
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
