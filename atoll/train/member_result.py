"""What one member tells when its part in a run has ended."""

from __future__ import annotations

import platform
from typing import Any

import torch

from atoll import __version__
from atoll.task import Task
from atoll.train.metrics import Totals


def member_result(
    *, member: str, slot: int, seed: int, stopped: bool, totals: Totals
) -> dict[str, Any]:
    """Return a member's part of the summary, without what it has trained."""
    return {
        "member": member,
        "slot": slot,
        **totals.to_dict(),
        "stopped": stopped,
        "reason": "asked to stop" if stopped else "",
        "seed": seed,
        "versions": {
            "atoll": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def trained(task: Task, *, totals: Totals, digest: str) -> dict[str, Any]:
    """Return what a member has trained."""
    return {
        "steps": task.step,
        "tokens": task.tokens,
        "rounds": task.round,
        "parameters": task.num_parameters,
        "digests": task.past,
        "digest": digest,
        "tokens_per_s": task.tokens / totals.wall_s if totals.wall_s > 0 else 0.0,
    }
