"""The part of a report about the paths of a modular model: curves by path, modules, shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.train.report.charts import Chart, Trace, layout, line
from atoll.train.report.tables import table, text

DRAWN = 16
"""Paths with a curve; the table has all."""

Points = Sequence[Mapping[str, Any]]


def path_charts(paths: Mapping[str, Any], points: Points) -> list[Chart]:
    """Return training and held-out loss of each path, no matter which member trained it."""
    training: list[Trace] = []
    held_out: list[Trace] = []
    for row in paths["paths"][:DRAWN]:
        path = row["path"]
        own = [point for point in points if point["values"].get("path") == path]
        trained = [(p["step"], p["values"]["loss"]) for p in own if "loss" in p["values"]]
        measured = [
            (p["step"], p["values"]["held_out_loss_sum"] / p["values"]["held_out_tokens"])
            for p in own
            if p["values"].get("held_out_tokens")
        ]
        for traces, found in ((training, trained), (held_out, measured)):
            found.sort(key=lambda one: one[0])
            xs, ys = [step for step, _ in found], [loss for _, loss in found]
            traces.append(line(xs, ys, f"path {path}", path))
    about = f" The first {DRAWN} paths." if len(paths["paths"]) > DRAWN else ""
    look = layout("step", "nats per token")
    return [
        ("Loss of paths", "Training loss of each path." + about, training, look),
        ("Held-out loss of paths", "On the held-out text of each." + about, held_out, look),
    ]


def path_tables(paths: Mapping[str, Any]) -> str:
    """Return who trained what: levels and modules, then the paths with their shards."""
    modules = "".join(
        f"<tr><td>{level}</td><td>{one['module']}</td>"
        f"<td>{', '.join(map(str, one['paths']))}</td></tr>"
        for level, row in enumerate(paths["levels"])
        for one in row
    )
    body = "".join(_row(row) for row in paths["paths"])
    heads = [
        "path", "modules", "trained by", "state", "step", "tokens", "loss", "held-out", "best",
        "at step", "stopped early", "documents", "tokens of its shard",
    ]  # fmt: skip
    found = table("Paths", heads, body) + table("Modules", ["level", "module", "paths"], modules)
    if paths["empty"]:
        found += f"<p>Empty shards: {', '.join(map(str, paths['empty']))}</p>"
    return found


def _row(row: Mapping[str, Any]) -> str:
    cells = [
        row["path"], ", ".join(map(str, row["modules"])), row["name"], row["state"], row["step"],
        f"{row['tokens']:,}", _loss(row["loss"]), _loss(row["held_out"]), _loss(row["best"]),
        _known(row["best_step"]), "yes" if row["stopped_early"] else "no",
        _known(row["documents"]), _known(row["shard_tokens"]),
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>"


def _known(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
