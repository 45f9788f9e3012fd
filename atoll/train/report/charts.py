"""The form of a report's charts, and their common style."""

from __future__ import annotations

from typing import Any

Trace = dict[str, Any]
"""Lines, dots or bars, with the keys of plotly's traces as far as `svg.py` draws them: `x`, `y`,
`name`, `mode`, `line`, `marker`, `type`, `orientation`, `base`, `error_y`, `showlegend`."""

Chart = tuple[str, str, list[Trace], dict[str, Any]]
"""Title, what it shows in a sentence, traces, axes."""

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf")
"""Each stands for a variable of the style sheet, which is lighter where the page is dark."""


def line(xs: list[Any], ys: list[Any], name: str, index: int) -> Trace:
    """Return a line trace in the colour of number `index`."""
    colour = COLOURS[index % len(COLOURS)]
    style = {"color": colour, "width": 1.5}
    return {"x": xs, "y": ys, "name": name, "mode": "lines", "line": style}


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    """Return the axes of a chart.

    Args:
        x: Title of the axis across.
        y: Title of the axis upwards.
        more: `unit_x`, `unit_y`: "bytes" or "duration"; `log_x`, `log_y`; `range_x`, `range_y`:
            their ends; `panels`: whether each trace has a picture of its own.
    """
    return {"x": x, "y": y, **more}
