"""The form of a report's charts, and their common style."""

from __future__ import annotations

from typing import Any

Trace = dict[str, Any]
Chart = tuple[str, str, list[Trace], dict[str, Any]]
"""Title, what it shows in a sentence, plotly traces, plotly layout."""

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf")


def line(xs: list[Any], ys: list[Any], name: str, index: int) -> Trace:
    """Return a line trace in the colour of number `index`."""
    colour = COLOURS[index % len(COLOURS)]
    style = {"color": colour, "width": 1.5}
    return {"x": xs, "y": ys, "name": name, "mode": "lines", "line": style}


def layout(x: str, y: str) -> dict[str, Any]:
    """Return a plotly layout with titles for both axes."""
    return {
        "margin": {"l": 60, "r": 20, "t": 10, "b": 45},
        "height": 340,
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "legend": {"orientation": "h", "y": 1.12},
    }
