"""Imports large packages with the garbage collector off, and exempts them from it afterwards.

Python's collector traverses everything a package defines several times while torch is imported, and
at every full collection of the training. Without that a worker is ready 0.2 s of processor time
earlier (of 1.9, `python -m bench.startup`).
"""

from __future__ import annotations

import gc
import importlib

from atoll.config import JobSpec, RankPlace


def modules_of_rank(spec: JobSpec, place: RankPlace | None) -> list[str]:
    """Return the modules that a rank of an island needs besides the trainer; else none.

    DDP, FSDP and pipelines load torch's compiler even if nothing is compiled.
    """
    if place is None:
        return []
    compiler = ["torch._dynamo"] if spec.mesh.ranks > spec.mesh.tensor else []
    return [*compiler, "atoll.train.island.island_trainer"]


def load(*names: str) -> None:
    """Import modules; all objects that exist afterwards are never collected."""
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
