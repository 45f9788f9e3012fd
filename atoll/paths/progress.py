"""What people see of each path: who trained it, how far it is, and its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from atoll.wire.paths import PathReport


class PathProgress(msgspec.Struct):
    """One path."""

    member: str = ""
    """Who has trained or exported it last."""
    step: int = 0
    tokens: int = 0
    """Of all phases that were trained, also of those that were trained again."""
    loss: float | None = None
    """Mean training loss of its newest phase."""
    held_out: float | None = None
    """Newest loss on its own held-out data."""
    best_step: int | None = None
    """Step at which that loss was least so far; None: it has no held-out data of its own."""
    history: int = 0
    phase: int = -1
    """The newest phase that was counted, and the history that it belongs to."""


def note(
    progress: dict[int, PathProgress], member: str, report: PathReport, *, at: tuple[int, int],
    least: Mapping[int, float],
) -> None:  # fmt: skip
    """Take up a report of a path; a repeated one changes nothing.

    Args:
        progress: Of all paths, changed.
        member: Who reports.
        report: What it did.
        at: The history and the phase that it belongs to.
        least: Least held-out loss of each path before.
    """
    known = progress.setdefault(report.path, PathProgress())
    if at <= (known.history, known.phase):
        return
    known.history, known.phase = at
    known.member, known.step = member, report.step
    known.tokens += report.tokens
    if report.loss is not None:
        known.loss = report.loss
    if report.held_out is not None:
        known.held_out = report.held_out
        if report.held_out < least.get(report.path, math.inf):
            known.best_step = report.measured
