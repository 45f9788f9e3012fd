"""A report's charts as static SVG: no script, no font, no network; colours follow the page's theme.

Drawn here and not by a library: plotly.js alone has 4.8 MB, and a chart must read on a phone, in
the dark and on paper. Texts are 26 units high in a picture of 880, so about 11 px on a phone and
15 px in a column of a wide page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll import units
from atoll.train.report.charts import Trace

WIDTH, HEIGHT = 880, 500
LEFT, RIGHT, TOP, BOTTOM = 110, 36, 44, 78
ROW_NAME = 11
"""Most characters of a row's name, which stands left of its bar."""

BAR_ROW = 44
"""Height of one row of a chart of horizontal bars."""

MAX_POINTS, LEAST_POINTS, ALL_POINTS = 200, 24, 2400
"""Most and fewest points of a line, and most of a chart: lines are thinned by means."""

MAX_LINES = 40
"""Lines drawn in one chart."""
MAX_NAMES = 12
"""Names in a legend."""

VARIABLES = {
    "#1f77b4": "--c0", "#ff7f0e": "--c1", "#2ca02c": "--c2", "#9467bd": "--c3", "#8c564b": "--c4",
    "#e377c2": "--c5", "#7f7f7f": "--c6", "#17becf": "--c7", "#d62728": "--strong",
    "#888": "--quiet",
}  # fmt: skip
"""Colour of a trace -> the style sheet's variable, which has a light and a dark value."""


def draw(title: str, traces: Sequence[Trace], look: Mapping[str, Any]) -> str:
    """Return the HTML of a chart: a picture, or one for each trace, and a legend."""
    shown = [_thinned(trace, len(traces)) for trace in traces[:MAX_LINES] if trace["y"]]
    if not shown:
        return "<p class='none'>nothing was measured</p>"
    if look.get("panels"):
        pictures = "".join(
            f"<figure class='panel'><figcaption>{_text(trace.get('name', ''))}</figcaption>"
            f"{_picture(str(trace.get('name', title)), [trace], look)}</figure>"
            for trace in shown
        )
        return f"<div class='panels'>{pictures}</div>"
    return _picture(title, shown, look) + _legend(shown, len(traces))


def _picture(title: str, traces: Sequence[Trace], look: Mapping[str, Any]) -> str:
    flat = any(trace.get("orientation") == "h" for trace in traces)
    rows = list(dict.fromkeys(y for trace in traces for y in trace["y"])) if flat else []
    height = TOP + BOTTOM + max(1, len(rows)) * BAR_ROW if flat else HEIGHT
    across = _axis(_extent(traces, "x"), look, "x", (LEFT, WIDTH - RIGHT))
    parts = [_ticks_across(across, height)]
    if flat:
        parts += [_row_name(row, place) for place, row in enumerate(rows)]
        parts += [_flat_bars(trace, rows, across) for trace in traces]
    else:
        up = _axis(_extent(traces, "y"), look, "y", (height - BOTTOM, TOP))
        parts.append(_ticks_up(up))
        parts += [_marks(trace, across, up) for trace in traces]
    label = _text(f"{title}: {look['y'] or look['x']}")
    named = (
        f"<text x='{WIDTH - RIGHT}' y='{height - 10}' text-anchor='end'>{_text(look['x'])}</text>"
    )
    named += f"<text x='4' y='26'>{_text(look['y'])}</text>"
    return (
        f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='{label}'>"
        f"{''.join(parts)}{named}</svg>"
    )


# --------------------------------------------------------------------------------- scales


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to places in the picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    unit: str

    def place(self, value: float) -> int:
        """Return where a value is, in units of the picture."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + min(1.02, max(-0.02, share)) * (self.end - self.start))

    def ticks(self) -> list[float]:
        """Return round values, about five."""
        if self.log:
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / 4, self.unit)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [step * k for k in range(first, last + 1)]

    def label(self, value: float) -> str:
        """Return a value for people, in the unit of the axis."""
        if self.unit == "bytes":
            return units.size(value).replace(".0 ", " ")
        if self.unit == "duration":
            return units.duration(value)
        if abs(value) >= 10_000:
            return units.count(value).replace(".0 ", " ")
        return f"{value:.4g}"


def _axis(
    extent: tuple[float, float], look: Mapping[str, Any], name: str, ends: tuple[float, float]
) -> Axis:
    low, high = look.get(f"range_{name}") or extent
    log = bool(look.get(f"log_{name}")) and high > 0
    if log:
        low = max(low, high * 1e-9) if low > 0 else high * 1e-3
        low, high = (low * 0.8, high * 1.25) if high / low < 1.05 else (low, high)
    elif high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    elif name == "y" and not look.get("range_y"):
        margin = (high - low) * 0.05
        low, high = (low - margin if low else low), high + margin
    return Axis(low, high, *ends, log, str(look.get(f"unit_{name}") or ""))


def _extent(traces: Sequence[Trace], name: str) -> tuple[float, float]:
    """Return the least and the greatest value of all traces; (0, 1) without any."""
    values = [float(v) for trace in traces for v in _reach(trace, name) if math.isfinite(float(v))]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _reach(trace: Trace, name: str) -> list[Any]:
    if trace.get("type") != "bar":
        return list(trace[name])
    if trace.get("orientation") == "h":
        base = trace.get("base") or [0.0] * len(trace["x"])
        return (
            [] if name == "y" else [*base, *(b + x for b, x in zip(base, trace["x"], strict=True))]
        )
    if name == "y":
        return [0.0, *trace["y"]]
    return [x + side for x in trace["x"] for side in (-0.5, 0.5)]


def _round_step(rough: float, unit: str) -> float:
    """Return a round number near a step between ticks; of times, one that clocks have."""
    if unit == "duration":
        steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200)
        return next((step for step in steps if step >= rough), 86_400 * math.ceil(rough / 86_400))
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) >= 3:
            return found[:: max(1, len(found) // 5)]
    return [low, high]


# ----------------------------------------------------------------------------------- marks


def _ticks_across(axis: Axis, height: int) -> str:
    floor = height - BOTTOM
    lines = "".join(f"M{axis.place(v)} {TOP}V{floor}" for v in axis.ticks())
    words = "".join(
        f"<text x='{axis.place(v)}' y='{floor + 32}' text-anchor='middle'>{axis.label(v)}</text>"
        for v in axis.ticks()
    )
    return f"<path class='grid' d='{lines}'/>{words}"


def _ticks_up(axis: Axis) -> str:
    lines = "".join(f"M{LEFT} {axis.place(v)}H{WIDTH - RIGHT}" for v in axis.ticks())
    words = "".join(
        f"<text x='{LEFT - 10}' y='{axis.place(v) + 9}' text-anchor='end'>{axis.label(v)}</text>"
        for v in axis.ticks()
    )
    return f"<path class='grid' d='{lines}'/>{words}"


def _marks(trace: Trace, across: Axis, up: Axis) -> str:
    """Return a line, dots or upright bars, with the trace's name as its tooltip."""
    points = [
        (across.place(float(x)), up.place(float(y)))
        for x, y in zip(trace["x"], trace["y"], strict=True)
        if math.isfinite(float(y))
    ]
    colour, name = _colour(trace), f"<title>{_text(trace.get('name', ''))}</title>"
    if trace.get("type") == "bar":
        half = max(2, (across.place(1.0) - across.place(0.0)) * 2 // 5)
        floor = up.place(0.0)
        bars = "".join(f"M{x - half} {floor}V{y}H{x + half}V{floor}Z" for x, y in points)
        return f"<path d='{bars}' style='fill:{colour}'>{name}</path>"
    style = trace.get("line") or {}
    found = ""
    if "lines" in str(trace.get("mode", "lines")) and len(points) > 1:
        dash = ";stroke-dasharray:9 9" if style.get("dash") else ""
        width = 2 * float(style.get("width", 2))
        opacity = f";opacity:{style['opacity']}" if style.get("opacity") else ""
        found += (
            f"<path class='line' d='{_path(points, stairs=style.get('shape') == 'hv')}' "
            f"style='stroke:{colour};stroke-width:{width:g}{dash}{opacity}'>{name}</path>"
        )
    if "markers" in str(trace.get("mode", "")) or len(points) == 1:
        dots = "".join(f"M{x} {y}h0" for x, y in points)
        found += f"<path class='dots' d='{dots}' style='stroke:{colour}'>{name}</path>"
    return found + _error_bars(trace, across, up, colour)


def _error_bars(trace: Trace, across: Axis, up: Axis, colour: str) -> str:
    errors = trace.get("error_y")
    if not errors:
        return ""
    lines = "".join(
        f"M{across.place(x)} {up.place(y - less)}V{up.place(y + more)}"
        for x, y, more, less in zip(
            trace["x"], trace["y"], errors["array"], errors["arrayminus"], strict=True
        )
    )
    return f"<path class='line' d='{lines}' style='stroke:{colour};stroke-width:4'/>"


def _path(points: Sequence[tuple[int, int]], *, stairs: bool) -> str:
    found, before = [f"M{points[0][0]} {points[0][1]}"], points[0]
    for x, y in points[1:]:
        if (x, y) == before:
            continue
        found.append(f"H{x}V{y}" if stairs else f"L{x} {y}")
        before = (x, y)
    return "".join(found)


def _flat_bars(trace: Trace, rows: Sequence[object], across: Axis) -> str:
    base = trace.get("base") or [0.0] * len(trace["x"])
    found = []
    for row, begin, length in zip(trace["y"], base, trace["x"], strict=True):
        left, right = across.place(float(begin)), across.place(float(begin) + float(length))
        if right > left:
            top = TOP + rows.index(row) * BAR_ROW + 8
            found.append(f"M{left} {top}H{right}v{BAR_ROW - 16}H{left}Z")
    name = f"<title>{_text(trace.get('name', ''))}</title>"
    return f"<path d='{''.join(found)}' style='fill:{_colour(trace)}'>{name}</path>"


def _row_name(row: object, place: int) -> str:
    y, shown = TOP + place * BAR_ROW + 30, str(row)
    shown = shown if len(shown) <= ROW_NAME else f"{shown[: ROW_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    look = "text-anchor='end' style='font-size:18px'"
    return f"<text x='{LEFT - 10}' y='{y}' {look}>{_text(shown)}</text>"


# ---------------------------------------------------------------------------------- legend


def _legend(traces: Sequence[Trace], count: int) -> str:
    named = [trace for trace in traces if trace.get("name") and trace.get("showlegend", True)]
    if len(named) < 2:
        return ""
    items = "".join(
        f"<span><i style='background:{_colour(trace)}'></i>{_text(trace['name'])}</span>"
        for trace in named[:MAX_NAMES]
    )
    more = count - min(len(named), MAX_NAMES) - (len(traces) - len(named))
    return f"<p class='legend'>{items}{f'and {more} more' if more > 0 else ''}</p>"


def _colour(trace: Trace) -> str:
    colour = (trace.get("line") or trace.get("marker") or {}).get("color", "#1f77b4")
    return f"var({VARIABLES.get(str(colour), '--c0')})"


def _thinned(trace: Trace, count: int) -> Trace:
    """Return a line with at most so many points that the chart stays small."""
    most = min(MAX_POINTS, max(LEAST_POINTS, ALL_POINTS // max(1, min(count, MAX_LINES))))
    length = len(trace["y"])
    if trace.get("type") == "bar" or length <= most:
        return trace
    cells = [slice(length * k // most, length * (k + 1) // most) for k in range(most)]
    mean: Callable[[Sequence[float]], float] = lambda values: sum(values) / len(values)  # noqa: E731
    return {
        **trace,
        "x": [mean([float(v) for v in trace["x"][cell]]) for cell in cells],
        "y": [mean([float(v) for v in trace["y"][cell]]) for cell in cells],
    }


def _text(value: object) -> str:
    return html.escape(str(value))
