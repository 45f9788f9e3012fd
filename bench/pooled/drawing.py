"""Curves of a group: return against environment steps, one panel per task, one line per variant."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from bench.pooled.groups import Task
from bench.pooled.results import Found

COLOURS = {"pooled": "#0b6e99", "own": "#d9730d", "unconditioned": "#8a8f94", "sb3": "#6940a5"}
LINE = "#d9dde1"
POINTS = 40
"""Places along the steps at which seeds are averaged."""


def draw(found: Found, path: Path) -> None:
    """Write the figure of a group; the same runs give the same file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib", given="it is not installed",
            remedy="pip install 'atoll[bench]'",
        ) from error  # fmt: skip
    settings: Any = {"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 8}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, task in zip(panels, found.group.tasks, strict=True):
            for variant in found.variants():
                _line(axes, found, task, variant)
            axes.axhline(task.target, color="#37352f", linewidth=0.6, linestyle=":")
            axes.set_title(task.name, loc="left", fontsize=8)
            axes.grid(color=LINE, linewidth=0.5)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.supxlabel("environment steps of this policy", fontsize=8)
        figure.supylabel("mean return of 20 episodes", fontsize=8)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    drawn = path.read_text(encoding="utf-8")  # a hundredth of a point is enough
    path.write_text(
        re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", drawn), encoding="utf-8"
    )


def _line(axes: Any, found: Found, task: Task, variant: str) -> None:
    """Draw the mean over seeds, and one standard error around it."""
    curves = [run["curves"][task.name] for run in found.runs[variant].values()]
    steps, means, errors = averaged(curves, task.steps)
    colour = COLOURS[variant]
    axes.plot(steps, means, color=colour, linewidth=1.2, label=variant)
    low = [mean - error for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def averaged(
    curves: Sequence[Sequence[Sequence[Any]]], until: int
) -> tuple[list[float], list[float], list[float]]:
    """Return steps, the mean over seeds, and its standard error, where all seeds have a mean."""
    steps, means, errors = [], [], []
    for place in range(1, POINTS + 1):
        at = until * place / POINTS
        values = [_at(curve, at) for curve in curves]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue
        mean = sum(known) / len(known)
        spread = math.fsum((value - mean) ** 2 for value in known)
        error = math.sqrt(spread / max(1, len(known) - 1) / len(known))
        steps.append(at)
        means.append(mean)
        errors.append(error)
    return steps, means, errors


def _at(curve: Sequence[Sequence[Any]], steps: float) -> float | None:
    """Return the newest mean at so many steps."""
    known = [mean for env_steps, mean in curve if env_steps <= steps and mean is not None]
    return float(known[-1]) if known else None
