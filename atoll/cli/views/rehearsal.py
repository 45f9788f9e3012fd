"""The page of a rehearsal, for a terminal of 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.units import duration, size

if TYPE_CHECKING:
    from atoll.rehearse.compare import Report

WIDTH = 80
ROW = "{:>8}{:>9}{:>9}{:>8}{:>7}{:>11}{:>11}{:>8}{:>8}"


def page(report: Report) -> Iterator[str]:
    """Yield the lines of a page."""
    how = "seen" if report.real else "sim."
    yield f"{report.job} on {report.machines} machines, {report.steps:,} steps"
    yield ""
    yield ROW.format("", "steps", "", "rounds", "", "sent", "", "loss", "")
    yield ROW.format("time", *(["plan", how] * 4))
    for seconds, one, other in report.rows():
        yield ROW.format(
            duration(seconds), f"{one.steps:,.0f}", f"{other.steps:,.0f}", f"{one.rounds:,.0f}",
            f"{other.rounds:,.0f}", size(one.sent_bytes), size(other.sent_bytes),
            _loss(one.loss), _loss(other.loss),
        )  # fmt: skip
    yield ""
    for seconds, text in report.events:
        yield f"  {duration(seconds):>6}  {text}"
    for note in report.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")
    yield report.verdict()


def _loss(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
