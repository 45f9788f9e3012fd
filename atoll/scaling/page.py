"""`scaling.html`: a fitted law, its runs and its predictions in one file that opens offline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from atoll.scaling.fit import Fit, predicted_losses
from atoll.scaling.optimum import Optimum
from atoll.scaling.points import LETTERS, Point
from atoll.scaling.predict import Prediction
from atoll.train.report.charts import COLOURS, Chart, Trace, layout
from atoll.train.report.report import page
from atoll.train.report.tables import boxes, table, text

CURVE = 40
"""Points of a drawn curve."""
BEYOND = 10.0
"""How far a curve is drawn beyond the largest run."""


def render(
    fit: Fit, *, predictions: Sequence[Prediction] = (), optima: Sequence[Optimum] = ()
) -> str:
    """Return the page."""
    head = boxes(
        {
            f"{fit.law.title} =": fit.law.equation,
            "runs": len(fit.points),
            "error of a left-out run": f"{fit.score:.2%}",
            "error of the largest, held out": f"{fit.held_out.mean_error:.2%}"
            if fit.held_out
            else None,
        }
    )
    charts = [loss_chart(fit, predictions), agreement_chart(fit)]
    notes = [*fit.notes, *(note for one in predictions for note in one.notes)]
    notes += [note for one in optima for note in one.notes]
    if fit.held_out is None:
        notes.append(f"no size was held out: {fit.held_out_note}")
    said = "".join(f"<li>{text(note)}</li>" for note in dict.fromkeys(notes))
    tail = _constants(fit) + _predictions(predictions) + _optima(optima) + _runs(fit)
    return page(
        "Scaling law", head=head + f"<p>params: {text(fit.counted)}</p><ul>{said}</ul>",
        charts=charts, tail=tail,
    )  # fmt: skip


def loss_chart(fit: Fit, predictions: Sequence[Prediction] = ()) -> Chart:
    """Return the loss over size (or data), a curve for each combination of the other variables."""
    axis = "params" if "params" in fit.law.variables else "tokens"
    others = [name for name in fit.law.variables if name != axis]
    groups: dict[tuple[float, ...], list[Point]] = {}
    for point in fit.points:
        groups.setdefault(tuple(point.value(name) for name in others), []).append(point)
    traces: list[Trace] = []
    for index, (values, points) in enumerate(sorted(groups.items())):
        name = ", ".join(f"{LETTERS[o]} = {v:.4g}" for o, v in zip(others, values, strict=True))
        colour = COLOURS[index % len(COLOURS)]
        at = [point.value(axis) for point in points]
        measured = {
            "x": at, "y": [point.loss for point in points], "name": name or "runs",
            "mode": "markers", "marker": {"color": colour, "size": 8}, "legendgroup": str(index),
        }  # fmt: skip
        low, high = math.log(min(at)), math.log(max(at) * BEYOND)
        along = [math.exp(low + (high - low) * k / (CURVE - 1)) for k in range(CURVE)]
        curve_points = [_moved(points[0], axis, x) for x in along]
        curve = {
            "x": along, "y": [float(y) for y in predicted_losses(fit.law, fit.theta, curve_points)],
            "mode": "lines", "line": {"color": colour, "width": 1.5, "dash": "dot"},
            "legendgroup": str(index), "showlegend": False,
        }  # fmt: skip
        traces += [measured, curve]
    traces += [_predicted(one, axis) for one in predictions]
    look = layout(axis, "held-out loss, nats", log_x=True, log_y=True)
    about = "Dots: runs. Dotted lines: the law, drawn to ten times the largest run."
    return "Loss", about, traces, look


def _moved(point: Point, axis: str, value: float) -> Point:
    if axis == "params":
        return dataclasses.replace(point, params=value)
    return dataclasses.replace(point, tokens=value)


def _predicted(one: Prediction, axis: str) -> Trace:
    return {
        "x": [one.at[axis]], "y": [one.loss], "name": "predicted", "mode": "markers",
        "marker": {"color": "#d62728", "size": 11, "symbol": "diamond"},
        "error_y": {"type": "data", "symmetric": False, "array": [one.high - one.loss],
                    "arrayminus": [one.loss - one.low]},
    }  # fmt: skip


def agreement_chart(fit: Fit) -> Chart:
    """Return the fitted against the measured loss of each run."""
    fitted = [float(y) for y in predicted_losses(fit.law, fit.theta, fit.points)]
    measured = [point.loss for point in fit.points]
    ends = [min(measured), max(measured)]
    traces: list[Trace] = [
        {
            "x": measured, "y": fitted, "mode": "markers", "name": "runs",
            "text": [point.name for point in fit.points],
        },
        {"x": ends, "y": ends, "mode": "lines", "name": "equal", "line": {"color": "#888"}},
    ]  # fmt: skip
    if fit.held_out is not None:
        traces.append(
            {
                "x": [one["measured"] for one in fit.held_out.runs],
                "y": [one["predicted"] for one in fit.held_out.runs],
                "mode": "markers", "name": f"largest {fit.held_out.variable}, held out",
                "marker": {"color": "#d62728", "symbol": "x", "size": 9},
            }
        )  # fmt: skip
    about = "Each run; crosses are predicted by a fit without the largest size."
    return "Fitted and measured", about, traces, layout("measured", "fitted or predicted")


def _row(cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>"


def _constants(fit: Fit) -> str:
    rows = [
        (name, f"{value:.5g}", "{:.4g} to {:.4g}".format(*fit.interval(name)))
        for name, value in fit.constants().items()
    ]
    return table("Constants", ["", "value", "90 % interval"], "".join(map(_row, rows)))


def _predictions(found: Sequence[Prediction]) -> str:
    rows = [
        (
            ", ".join(f"{name} {value:.4g}" for name, value in one.at.items()),
            f"{one.loss:.4f}",
            f"{one.low:.4f} to {one.high:.4f}",
        )
        for one in found
    ]
    return table("Predictions", ["at", "loss", "90 % interval"], "".join(map(_row, rows)))


def _optima(found: Sequence[Optimum]) -> str:
    rows = [
        (
            f"{one.flops:.3g}",
            f"{one.params:.4g} ({one.params_interval[0]:.3g} to {one.params_interval[1]:.3g})",
            f"{one.tokens:.4g} ({one.tokens_interval[0]:.3g} to {one.tokens_interval[1]:.3g})",
            f"{one.prediction.loss:.4f}",
        )
        for one in found
    ]
    return table("Best sizes", ["FLOPs", "params", "tokens", "loss"], "".join(map(_row, rows)))


def _runs(fit: Fit) -> str:
    fitted = predicted_losses(fit.law, fit.theta, fit.points)
    rows = [
        (
            point.name, f"{point.params:.4g}", f"{point.tokens:.4g}", f"{point.members:g}",
            f"{point.every:g}", f"{point.loss:.4f}", f"{float(loss):.4f}",
            f"{float(loss) / point.loss - 1:+.2%}",
        )
        for point, loss in zip(fit.points, fitted, strict=True)
    ]  # fmt: skip
    heads = ["run", "params", "tokens", "members", "every", "loss", "fitted", "error"]
    return table("Runs", heads, "".join(map(_row, rows)))
