"""`report.html`: a run's verdict, curves and tables in one file that opens offline. Loads no torch.

It has no script: charts are static SVG, styles are inline, and colours follow the reader's theme.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.config.writing import without_secrets
from atoll.ids import machine_names
from atoll.train.report.charts import Chart, Trace, layout, line
from atoll.train.report.machines import by_machine, machines_of
from atoll.train.report.paths import path_charts, path_tables
from atoll.train.report.rl import gallery, policy_table, read_episodes, rl_charts, rl_tiles, texts
from atoll.train.report.svg import draw
from atoll.train.report.tables import event_table, member_table, text, tiles, worth
from atoll.train.report.verdict import verdict
from atoll.train.results.summary import (
    SUMMARY_NAME,
    ddp_bytes,
    held_out_losses,
    read_lines,
    write_whole,
)

REPORT_NAME = "report.html"
ROUNDS_NAME = "rounds.json"
TIMELINE_ROUNDS = 40
TIMELINE_BARS = 640
"""Most bars of one phase in that chart: fewer rounds are drawn of many members."""
STRETCHES = 60
"""Most intervals into which a member's time is divided in the chart of time."""
PHASES = {
    "compute_s": ("computing", "#2ca02c"),
    "wait_s": ("waiting", "#d62728"),
    "send_s": ("sending", "#1f77b4"),
    "vote_s": ("agreeing", "#9467bd"),
}
"""Phases of a round up to its commit: label and colour."""

Points = Sequence[Mapping[str, Any]]


def write_report(folder: Path) -> Path:
    """Write `report.html` from the other files of a run's folder; missing files are skipped.

    Raises:
        StorageFull: the disk is full.
    """
    summary_path = folder / SUMMARY_NAME
    summary = json.loads(summary_path.read_text("utf-8")) if summary_path.exists() else {}
    job_path = folder / "job.toml"
    job_text = without_secrets(job_path.read_text("utf-8")) if job_path.exists() else ""
    points = read_lines(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    page = render(
        summary=summary, points=points, events=events, job_text=job_text,
        rounds=read_rounds(folder), episodes=read_episodes(folder, summary.get("rl") or {}),
    )  # fmt: skip
    return write_whole(folder / REPORT_NAME, page)


def read_rounds(folder: Path) -> Mapping[str, Any]:
    """Return what the hub wrote of the newest rounds and of node values, or nothing."""
    path = folder / ROUNDS_NAME
    try:
        found: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError:
        return {}
    return found


def render(
    *,
    summary: Mapping[str, Any],
    points: Points,
    events: Points,
    job_text: str,
    rounds: Mapping[str, Any] | None = None,
    episodes: Mapping[str, bytes] | None = None,
) -> str:
    """Return the page.

    `rounds` comes from :func:`read_rounds`, `episodes` from `read_episodes`.
    """
    rounds, rl = rounds or {}, summary.get("rl")
    charts = rl_charts(rl, points) if rl else _charts(summary, points)
    charts += timeline_charts(rounds.get("rounds", ()))
    nodes = machines_of(summary)
    charts = by_machine(charts, machine_names(nodes))
    paths = path_tables(summary["paths"]) if summary.get("paths") else ""
    sample = str(summary.get("sample") or "")
    tail = f"{paths}{worth(rounds.get('worth') or {})}{'' if rl else member_table(summary)}"
    tail += event_table(events, nodes)
    tail += f"<section><h2>Sample of the model</h2><pre>{text(sample)}</pre></section>" * bool(
        sample
    )
    tail += f"<details><summary>Job file</summary><pre>{text(job_text)}</pre></details>"
    title = f"Atoll run {summary.get('job', '')}".strip()
    return page(title, head=_head(summary, episodes or {}), charts=charts, tail=tail)


def page(title: str, *, head: str, charts: Sequence[Chart], tail: str) -> str:
    """Return a page that opens offline.

    Args:
        title: Of the page; plain text, as are the titles of charts.
        head: HTML before the charts.
        charts: What is drawn.
        tail: HTML after the charts.
    """
    sections = "".join(
        f"<section><h2>{text(name)}</h2><p>{text(about)}</p>{draw(name, traces, look)}</section>"
        for name, about, traces, look in charts
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{text(title)}</h1>{head}<div class='charts'>{sections}</div>{tail}"
        "</body></html>\n"
    )


def _head(summary: Mapping[str, Any], episodes: Mapping[str, bytes]) -> str:
    """Return the part before the charts: figures, and for policies their episodes and a table."""
    rl, opening = summary.get("rl"), f"<p class='verdict'>{text(verdict(summary))}</p>"
    if not rl:
        return opening + tiles(summary)
    return opening + rl_tiles(summary) + gallery(rl, episodes) + policy_table(rl) + texts(rl)


def _charts(summary: Mapping[str, Any], points: Points) -> list[Chart]:
    paths, unit = summary.get("paths"), summary.get("loss_unit", "")
    return [
        *(path_charts(paths, points) if paths else [loss_chart(points, unit=unit)]),
        speed_chart(points),
        time_chart(points),
        bytes_chart(points, summary),
        round_chart(points),
    ]


def members_of(points: Points) -> list[str]:
    """Return the members in the order of their slots."""
    return sorted({str(p["member"]) for p in points}, key=lambda name: (len(name), name))


def series(
    points: Points, member: str, name: str, *, of: str = "step"
) -> tuple[list[Any], list[Any]]:
    """Return x (step, or seconds since the first point if `of="time"`) and y of one value."""
    zero = min((float(p["time"]) for p in points), default=0.0)
    own = [point for point in points if point["member"] == member and name in point["values"]]
    if of == "step":
        own = continued(own)
    xs = [point["step"] if of == "step" else float(point["time"]) - zero for point in own]
    return xs, [point["values"][name] for point in own]


def continued(points: Points) -> list[Mapping[str, Any]]:
    """Return points without those that a resume went back behind: steps never decrease."""
    kept: list[Mapping[str, Any]] = []
    first = math.inf
    for point in reversed(points):
        if point["step"] <= first:
            kept.append(point)
            first = point["step"]
    return kept[::-1]


def loss_chart(points: Points, *, unit: str) -> Chart:
    """Return training loss by member, and held-out loss."""
    traces = [
        line(*series(points, member, "loss"), member, index)
        for index, member in enumerate(members_of(points))
    ]
    for trace in traces:
        trace["line"]["opacity"] = 0.6
    found = sorted(held_out_losses(points))
    traces.append(
        {
            "x": [step for step, _, _ in found],
            "y": [loss for _, _, loss in found],
            "name": "held-out",
            "mode": "lines+markers",
            "line": {"color": "#d62728", "width": 3},
        }
    )
    about = "Training loss of each member and loss of the common model on held-out data."
    return "Loss", about, traces, layout("step", unit)


def speed_chart(points: Points) -> Chart:
    """Return tokens per second by member."""
    traces = [
        line(*series(points, member, "tokens_per_s", of="time"), member, index)
        for index, member in enumerate(members_of(points))
    ]
    return (
        "Speed",
        "Tokens per second of each member.",
        traces,
        layout("time", "tokens/s", unit_x="duration"),
    )


def time_chart(points: Points) -> Chart:
    """Return how each member's time divides into computing, waiting, sending and saving."""
    members = members_of(points)
    kinds = {
        "compute_s": "computing",
        "wait_s": "waiting",
        "send_s": "sending",
        "checkpoint_s": "saving",
    }
    traces: list[Trace] = []
    for place, (name, label) in enumerate(kinds.items()):
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "y": [m for m in members for _ in stretches(points, m)],
                "x": [s[name] for m in members for s in stretches(points, m)],
                "base": [
                    s["start"] + sum(s[k] for k in list(kinds)[:place])
                    for m in members
                    for s in stretches(points, m)
                ],
                "marker": {"color": ("#2ca02c", "#d62728", "#1f77b4", "#9467bd")[place]},
                "hovertemplate": "%{x:.2f} s " + label + "<extra>%{y}</extra>",
            }
        )
    look = layout("time in training", "", unit_x="duration")
    return "Time", "Where each member's time went.", traces, look


def stretches(points: Points, member: str) -> list[dict[str, float]]:
    """Return each interval between two points of a member: its start, and seconds by kind."""
    names = ("compute_s", "wait_s", "send_s", "checkpoint_s")
    before = dict.fromkeys(("wall_s", *names), 0.0)
    found: list[dict[str, float]] = []
    for point in points:
        values = point["values"]
        if point["member"] != member or "wall_s" not in values:
            continue
        now = {name: float(values.get(name, before[name])) for name in before}
        if now["wall_s"] > before["wall_s"]:
            spent = {name: max(0.0, now[name] - before[name]) for name in names}
            found.append({"start": before["wall_s"], **spent})
        before = now
    return _joined(found, names)


def _joined(found: list[dict[str, float]], names: Sequence[str]) -> list[dict[str, float]]:
    """Return intervals joined to at most :data:`STRETCHES`, their seconds added."""
    each = -(-len(found) // STRETCHES) or 1
    groups = [found[start : start + each] for start in range(0, len(found), each)]
    return [
        {"start": group[0]["start"], **{name: sum(one[name] for one in group) for name in names}}
        for group in groups
    ]


def bytes_chart(points: Points, summary: Mapping[str, Any]) -> Chart:
    """Return bytes sent by member, against data parallel in every step."""
    traces: list[Trace] = []
    last_step = 0
    for index, member in enumerate(members_of(points)):
        xs, ys = series(points, member, "sent_bytes")
        ys = added_up(ys)
        last_step = max([last_step, *xs])
        traces.append(line(xs, ys, member, index))
    nodes, parameters = int(summary.get("nodes") or 1), int(summary.get("parameters") or 0)
    if nodes > 1 and parameters and last_step:
        steps = [max(1, last_step * k // 50) for k in range(1, 51)]
        sent = [ddp_bytes(parameters=parameters, members=nodes, steps=s) for s in steps]
        traces.append(
            {
                "x": steps,
                "y": sent,
                "name": "data parallel, fp32",
                "mode": "lines",
                "line": {"color": "#888", "dash": "dash"},
            }
        )
    look = layout("step", "sent", unit_y="bytes", log_y=True)
    about = "Bytes each member sent, against an fp32 all-reduce in every step (dashed)."
    return "Traffic", about, traces, look


def added_up(counts: Sequence[float]) -> list[float]:
    """Return totals from the counts of processes that follow each other, each from 0."""
    before, found = 0.0, [*counts[:1]]
    for last, count in pairwise(counts):
        before += last if count < last else 0.0
        found.append(before + count)
    return found


def round_chart(points: Points) -> Chart:
    """Return committed rounds over time by member."""
    zero = min((float(p["time"]) for p in points), default=0.0)
    traces: list[Trace] = []
    for index, member in enumerate(members_of(points)):
        own = [point for point in points if point["member"] == member]
        xs = [float(point["time"]) - zero for point in own]
        trace = line(xs, [point["round"] for point in own], member, index)
        trace["line"]["shape"] = "hv"
        traces.append(trace)
    about = "Rounds committed; members that stay together draw one line."
    return "Rounds", about, traces, layout("time", "rounds", unit_x="duration")


def timeline_charts(rounds: Points) -> list[Chart]:
    """Return what each member did in the newest rounds, as bars over time; empty without rounds."""
    shown = [one for one in rounds if one.get("timeline")]
    members = max((len(one["timeline"]) for one in shown), default=1)
    shown = shown[-max(4, min(TIMELINE_ROUNDS, TIMELINE_BARS // members)) :]
    if not shown:
        return []
    zero = min(float(one["time"]) - _round_s(row) for one in shown for row in one["timeline"])
    traces: list[Trace] = []
    for phase, (label, colour) in PHASES.items():
        ys, xs, bases = [], [], []
        for one in shown:
            for row in one["timeline"]:
                began = float(one["time"]) - _round_s(row) - zero
                before = list(PHASES)[: list(PHASES).index(phase)]
                ys.append(str(row["member"]))
                xs.append(row[phase] or 0.0)
                bases.append(began + sum(row[name] or 0.0 for name in before))
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": label, "y": ys, "x": xs, "base": bases,
                "marker": {"color": colour},
                "hovertemplate": "%{x:.2f} s " + label + "<extra>%{y}</extra>",
            }
        )  # fmt: skip
    look = layout("time", "", unit_x="duration")
    about = f"What each machine did in the last {len(shown)} rounds."
    return [("Timeline of rounds", about, traces, look)]


def _round_s(row: Mapping[str, Any]) -> float:
    """Return the seconds from the start of a member's period to the commit."""
    return sum(float(row[name] or 0.0) for name in PHASES)


_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1f2328;--dim:#5f6873;--rim:#d8dde3;--pale:#f5f7f9;
--c0:#1f77b4;--c1:#d9730d;--c2:#2a8a2a;--c3:#7f58b0;--c4:#8c564b;--c5:#c2569f;--c6:#70757a;
--c7:#0f8f9e;--strong:#d62728;--quiet:#8a8f95}
@media(prefers-color-scheme:dark){:root{--back:#15181c;--text:#e6e9ec;--dim:#9aa4ae;--rim:#353b42;
--pale:#1e2328;--c0:#5aa9e6;--c1:#ff9f4a;--c2:#5cc45c;--c3:#b794e0;--c4:#c08a7d;--c5:#f08fcb;
--c6:#a9afb5;--c7:#4fd0df;--strong:#ff6b6b;--quiet:#8a9199}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1080px;padding:24px;
color:var(--text);background:var(--back);overflow-wrap:anywhere}
h1{font-size:24px;margin:0 0 8px}h2{font-size:18px;margin:0}section{margin:32px 0;min-width:0}
section p{margin:2px 0 8px;color:var(--dim)}.verdict{font-size:18px;margin:0 0 20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}
.tiles div{border:1px solid var(--rim);border-radius:8px;padding:10px 12px}
.tiles b{display:block;font-size:18px;overflow-wrap:break-word}
.tiles span{color:var(--dim);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));
gap:0 32px}
svg{display:block;width:100%;height:auto;max-width:720px}svg text{font-size:26px;fill:var(--dim)}
.grid{stroke:var(--rim);stroke-width:2;fill:none}.line{fill:none;stroke-linejoin:round}
.dots{fill:none;stroke-width:14;stroke-linecap:round}.none{font-style:italic}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px}
.legend i{display:inline-block;width:14px;height:4px;margin-right:5px;vertical-align:middle}
.panels{display:grid;grid-template-columns:1fr 1fr;gap:8px}.panel{border:0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}
.episodes{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:14px}
figure{margin:0;border:1px solid var(--rim);border-radius:8px;overflow:hidden;min-width:0}
figure img{display:block;width:100%;aspect-ratio:4/3;object-fit:contain;background:var(--pale)}
figcaption{padding:8px 12px;color:var(--dim);font-size:13px}
th,td{text-align:left;padding:4px 10px;border-bottom:1px solid var(--rim);
overflow-wrap:normal}
pre{background:var(--pale);padding:12px;border-radius:8px;white-space:pre-wrap}
summary{font-size:18px;font-weight:bold;cursor:pointer}
@media(max-width:600px){body{padding:16px}}
"""
