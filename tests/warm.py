"""Processes that have loaded everything before they start: torch alone takes seconds to load.

One server per worker of pytest loads it once; every process is a fork of it, there in milliseconds.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

LOADED = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.nn.parallel",
    "torch.utils.checkpoint", "tests.group.victim", "tests.recovery.donor",
)  # fmt: skip


def processes() -> ForkServerContext:
    """Return where such processes are started; what they run must be picklable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context
