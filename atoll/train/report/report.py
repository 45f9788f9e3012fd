"""`report.html`: a run's plots and tables in one file that opens offline. Loads no torch.

plotly.js, copied from the installed plotly package, draws the charts; data and styles are inline.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.config.writing import without_secrets
from atoll.train.report.charts import Chart, Trace, layout, line
from atoll.train.report.paths import path_charts, path_tables
from atoll.train.report.rl import gallery, policy_table, read_episodes, rl_charts, rl_tiles, texts
from atoll.train.report.tables import event_table, member_table, text, tiles, worth
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
    paths = path_tables(summary["paths"]) if summary.get("paths") else ""
    sample = str(summary.get("sample") or "")
    tail = f"{paths}{worth(rounds.get('worth') or {})}{'' if rl else member_table(summary)}"
    tail += event_table(events)
    tail += f"<section><h2>Sample of the model</h2><pre>{text(sample)}</pre></section>" * bool(
        sample
    )
    tail += f"<section><h2>Job</h2><pre>{text(job_text)}</pre></section>"
    title = f"Atoll run {summary.get('job', '')}".strip()
    return page(title, head=_head(summary, episodes or {}), charts=charts, tail=tail)


def page(title: str, *, head: str, charts: Sequence[Chart], tail: str) -> str:
    """Return a page that opens offline.

    Args:
        title: Of the page; plain text, as are the titles of charts.
        head: HTML before the charts.
        charts: What plotly draws.
        tail: HTML after the charts.
    """
    sections = "".join(
        f"<section><h2>{text(name)}</h2><p>{text(about)}</p>"
        f'<div class="chart" id="chart{index}"></div></section>'
        for index, (name, about, _, _) in enumerate(charts)
    )
    data = json.dumps([{"traces": traces, "layout": look} for _, _, traces, look in charts])
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{text(title)}</h1>{head}{sections}{tail}"
        f"<script>{plotly_js()}</script>"
        # Escape every "<", so that no data can end the script element.
        f"<script>const charts = {data.replace('<', chr(92) + 'u003c')};{_SCRIPT}</script>"
        "</body></html>\n"
    )


def _head(summary: Mapping[str, Any], episodes: Mapping[str, bytes]) -> str:
    """Return the part before the charts: figures, and for policies their episodes and a table."""
    rl = summary.get("rl")
    if not rl:
        return tiles(summary)
    return rl_tiles(summary) + gallery(rl, episodes) + policy_table(rl) + texts(rl)


def _charts(summary: Mapping[str, Any], points: Points) -> list[Chart]:
    paths = summary.get("paths")
    return [
        *(path_charts(paths, points) if paths else [loss_chart(points)]),
        speed_chart(points),
        time_chart(points),
        bytes_chart(points, summary),
        round_chart(points),
    ]


def plotly_js() -> str:
    """Return the text of plotly.js from the installed package."""
    place = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    return place.read_text(encoding="utf-8")


def members_of(points: Points) -> list[str]:
    """Return the members in the order of their slots."""
    return sorted({str(p["member"]) for p in points}, key=lambda name: (len(name), name))


def series(
    points: Points, member: str, name: str, *, of: str = "step"
) -> tuple[list[Any], list[Any]]:
    """Return x (step, or seconds since the first point if `of="time"`) and y of one value."""
    zero = min((float(p["time"]) for p in points), default=0.0)
    xs: list[Any] = []
    ys: list[Any] = []
    for point in points:
        if point["member"] == member and name in point["values"]:
            xs.append(point["step"] if of == "step" else float(point["time"]) - zero)
            ys.append(point["values"][name])
    return xs, ys


def loss_chart(points: Points) -> Chart:
    """Return training loss by member, and held-out loss."""
    traces = [
        line(*series(points, member, "loss"), member, index)
        for index, member in enumerate(members_of(points))
    ]
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
    about = "Training loss of each member and loss of the common model on held-out text."
    return "Loss", about, traces, layout("step", "nats per token")


def speed_chart(points: Points) -> Chart:
    """Return tokens per second by member."""
    traces = [
        line(*series(points, member, "tokens_per_s", of="time"), member, index)
        for index, member in enumerate(members_of(points))
    ]
    return "Speed", "Tokens per second of each member.", traces, layout("seconds", "tokens/s")


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
    look = layout("seconds of training", "") | {"barmode": "overlay", "bargap": 0.35}
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
    return found


def bytes_chart(points: Points, summary: Mapping[str, Any]) -> Chart:
    """Return bytes sent by member, against data parallel in every step."""
    traces: list[Trace] = []
    last_step = 0
    for index, member in enumerate(members_of(points)):
        xs, ys = series(points, member, "sent_bytes")
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
    look = layout("step", "bytes sent")
    look["yaxis"] |= {"type": "log", "exponentformat": "SI"}
    about = "Bytes each member sent, against an fp32 all-reduce in every step (dashed)."
    return "Bytes", about, traces, look


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
    return "Rounds", about, traces, layout("seconds", "rounds")


def timeline_charts(rounds: Points) -> list[Chart]:
    """Return what each member did in the newest rounds, as bars over time; empty without rounds."""
    shown = [one for one in rounds if one.get("timeline")][-TIMELINE_ROUNDS:]
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
                ys.append(f"{row['member']} {row['node']}".strip())
                xs.append(row[phase] or 0.0)
                bases.append(began + sum(row[name] or 0.0 for name in before))
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": label, "y": ys, "x": xs, "base": bases,
                "marker": {"color": colour},
                "hovertemplate": "%{x:.2f} s " + label + "<extra>%{y}</extra>",
            }
        )  # fmt: skip
    look = layout("seconds", "") | {"barmode": "overlay", "bargap": 0.35}
    about = f"What each machine did in the last {len(shown)} rounds."
    return [("Timeline of rounds", about, traces, look)]


def _round_s(row: Mapping[str, Any]) -> float:
    """Return the seconds from the start of a member's period to the commit."""
    return sum(float(row[name] or 0.0) for name in PHASES)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1080px;padding:24px;color:#222}
h1{font-size:24px;margin:0 0 16px}h2{font-size:18px;margin:0}section{margin:32px 0}
section p{margin:2px 0 8px;color:#666}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}
.tiles div{border:1px solid #ddd;border-radius:8px;padding:10px 12px}
.tiles b{display:block;font-size:18px;overflow-wrap:anywhere}.tiles span{color:#666;font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}
.episodes{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:14px}
figure{margin:0;border:1px solid #ddd;border-radius:8px;overflow:hidden}
figure img{display:block;width:100%;aspect-ratio:4/3;object-fit:contain;background:#fbfbfb}
figcaption{padding:8px 12px;color:#666;font-size:13px}
th,td{text-align:left;padding:4px 10px;border-bottom:1px solid #eee}
pre{background:#f6f6f6;padding:12px;border-radius:8px;overflow-x:auto;white-space:pre-wrap}
"""

_SCRIPT = """
charts.forEach((chart, index) => Plotly.newPlot(
  'chart' + index, chart.traces, chart.layout, {responsive: true, displaylogo: false}));
"""
