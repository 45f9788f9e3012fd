"""A report's part about policies: episodes, curves, and the critic. Loads no torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atoll import units
from atoll.train.report.charts import COLOURS, Chart, Trace, layout, line
from atoll.train.report.tables import boxes, table, text
from atoll.train.results.rl_summary import curve, step_word

EPISODES = "episodes"
"""Folder of a run that holds a recorded episode of each policy, `POLICY.gif`."""

MAX_GIF_BYTES = 150_000
"""Of all recorded episodes together; larger ones stay beside the report, which refers to them."""

Points = Sequence[Mapping[str, Any]]
Rl = Mapping[str, Any]


def read_episodes(folder: Path, rl: Rl) -> dict[str, bytes]:
    """Return the recorded episodes by policy, as GIF bytes; empty: it stays beside the report."""
    found, left = {}, MAX_GIF_BYTES
    for policy in rl.get("policies") or ():
        path = folder / EPISODES / f"{policy['policy']}.gif"
        inside = path.resolve().is_relative_to(folder.resolve())
        if inside and path.is_file():
            size = path.stat().st_size
            found[str(policy["policy"])] = path.read_bytes() if size <= left else b""
            left -= size if size <= left else 0
    return found


def rl_tiles(summary: Mapping[str, Any]) -> str:
    """Return the figures of the run, one box each."""
    rl = summary["rl"]
    critic = rl.get("critic_member") or {}
    dropped = sum(_all(p["dropped"]) for p in rl["policies"]) + _all(critic.get("dropped") or {})
    speed, size = rl.get("env_steps_per_s"), rl.get("bytes_per_env_step")
    return boxes(
        {
            "policies": len(rl["policies"]),
            "algorithm": rl["algorithm"],
            "critic": rl["critic"],
            f"{step_word(rl)}s": f"{rl['env_steps']:,}",
            "steps/s, all policies": None if not speed else f"{speed:,.0f}",
            "updates of the critic": f"{critic['updates']:,}" if critic else None,
            "trajectories it learned from": f"{critic['trajectories']:,}" if critic else None,
            "trajectories dropped": f"{dropped:,}",
            f"sent per {step_word(rl)}": None if not size else units.size(size),
            "time": units.duration(summary.get("wall_s") or 0.0),
        }
    )


def gallery(rl: Rl, episodes: Mapping[str, bytes]) -> str:
    """Return the recorded episodes side by side, each with its policy's results."""
    figures = ""
    for policy in rl["policies"]:
        picture = episodes.get(str(policy["policy"]))
        if picture is None:
            continue
        source = f"{EPISODES}/{quote(str(policy['policy']))}.gif"
        if picture:
            source = f"data:image/gif;base64,{base64.b64encode(picture).decode('ascii')}"
        name, env = text(policy["policy"]), text(short_env(str(policy["env"])))
        figures += (
            f"<figure><img alt='an episode of {name}' src='{source}'>"
            f"<figcaption><b>{name}</b> {env}<br>return {text(rise(policy))}</figcaption></figure>"
        )
    if not figures:
        return ""
    about = "One episode of each policy at the end, always its most likely action."
    return (
        f"<section><h2>Episodes</h2><p>{about}</p><div class='episodes'>{figures}</div></section>"
    )


def rl_charts(rl: Rl, points: Points) -> list[Chart]:
    """Return the curves of the policies and of the critic."""
    charts = [
        _returns(rl, points),
        _explained(rl, points),
        *critic_charts(rl, points),
        _speed(rl, points),
        _waiting(rl, points),
    ]  # fmt: skip
    return [chart for chart in charts if any(trace["y"] for trace in chart[2])]


def critic_charts(rl: Rl, points: Points) -> list[Chart]:
    """Return the critic's loss by policy, and the staleness of its data."""
    critic = rl.get("critic_member")
    if not critic:
        return []
    own = [point for point in points if point["member"] == critic["member"]]
    traces = []
    for index, policy in enumerate(rl["policies"]):
        name = f"value_loss.{policy['policy']}"
        there = [point for point in own if name in point["values"]]
        xs, ys = [p["step"] for p in there], [p["values"][name] for p in there]
        traces.append(line(xs, ys, str(policy["policy"]), index))
    look = layout("updates of the critic", "value loss", log_y=True)
    about = "Loss of the critic's head of each policy, in units of that policy's own returns."
    counts = sorted((int(age), count) for age, count in critic["staleness"].items())
    bars = {
        "type": "bar", "name": "trajectories", "marker": {"color": COLOURS[0]},
        "x": [age for age, _ in counts], "y": [count for _, count in counts],
    }  # fmt: skip
    ages = layout("updates behind", "trajectories")
    old = "How many updates a policy was ahead of a trajectory when the critic learned from it."
    return [
        ("Loss of the critic", about, traces, look),
        ("Staleness", old, [bars], ages),
    ]


def policy_table(rl: Rl) -> str:
    """Return the results of each policy, with the critic below."""
    heads = [
        "policy", "environment", "return, first", "last", "best", "episodes", "steps", "updates",
        "waited for the queue", "sent", "dropped",
    ]  # fmt: skip
    rows = [
        [
            p["policy"], p["env"], number(p["return_first"]), number(p["return_last"]),
            number(p["return_best"]), f"{p['episodes']:,}", f"{p['env_steps']:,}",
            f"{p['updates']:,}", units.duration(p["queue_wait_s"]), units.size(p["sent_bytes"]),
            f"{_all(p['dropped']):,}",
        ]
        for p in rl["policies"]
    ]  # fmt: skip
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return table("Policies", heads, body)


def texts(rl: Rl) -> str:
    """Return sample completions of language models."""
    written = ""
    for policy in rl["policies"]:
        lines = "\n".join(str(one) for one in policy.get("texts") or ())
        if lines:
            written += f"<h3>{text(policy['policy'])}</h3><pre>{text(lines)}</pre>"
    return f"<section><h2>Completions</h2>{written}</section>" if written else ""


def short_env(env: str) -> str:
    """Return an environment's name without the module that makes it."""
    return env if env.startswith("text:") else env.rpartition(":")[2]


def rise(policy: Mapping[str, Any]) -> str:
    """Return a policy's first and last return, in words."""
    first, last = policy["return_first"], policy["return_last"]
    return f"{number(first)} \N{RIGHTWARDS ARROW} {number(last)}"


def number(value: float | None) -> str:
    """Return a return for people, with its significant digits only."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _returns(rl: Rl, points: Points) -> Chart:
    """Return the returns: in one chart if comparable, otherwise side by side."""
    policies = rl["policies"]
    traces = [
        line(*curve(points, policy["members"], "return"), str(policy["policy"]), index)
        for index, policy in enumerate(policies)
    ]
    look = layout(f"{step_word(rl)}s", "return")
    about = "Mean return of each policy's last episodes, against its own environment steps."
    if len({short_env(str(policy["env"])) for policy in policies}) > 1:
        look["panels"] = True
        about += " Each has its own scale, because tasks differ."
    return "Return", about, traces, look


def _explained(rl: Rl, points: Points) -> Chart:
    traces = []
    for index, policy in enumerate(rl["policies"]):
        xs, ys = curve(points, policy["members"], "explained_variance")
        traces.append(line(xs, [max(-1.0, y) for y in ys], str(policy["policy"]), index))
    look = layout(f"{step_word(rl)}s", "explained variance")
    low = min((y for trace in traces for y in trace["y"]), default=0.0)
    look["range_y"] = (min(-0.05, low), 1.05)
    about = (
        "Share of the variance of returns that the values an actor used had foreseen: 1 is all of "
        "it, 0 no more than their mean. Where every return is the same, nothing is left to explain."
    )
    return "Explained variance", about, traces, look


def _speed(rl: Rl, points: Points) -> Chart:
    traces = _over_time(rl, points, "env_steps_per_s")
    return (
        "Speed", f"{step_word(rl).capitalize()}s per second of each policy.",
        traces, layout("time", f"{step_word(rl)}s/s", unit_x="duration"),
    )  # fmt: skip


def _waiting(rl: Rl, points: Points) -> Chart:
    traces = _over_time(rl, points, "queue_wait_s")
    about = (
        "Seconds that each actor has waited for room in its queue: the critic is what is slow "
        "where this rises steadily."
    )
    return "Waiting", about, traces, layout("time", "waited", unit_x="duration", unit_y="duration")


def _over_time(rl: Rl, points: Points, name: str) -> list[Trace]:
    zero = min((float(point["time"]) for point in points), default=0.0)
    traces = []
    for index, policy in enumerate(rl["policies"]):
        for member in policy["members"]:
            own = [p for p in points if p["member"] == member and name in p["values"]]
            xs, ys = [float(p["time"]) - zero for p in own], [p["values"][name] for p in own]
            label = (
                policy["policy"] if len(policy["members"]) == 1 else f"{policy['policy']} {member}"
            )
            traces.append(line(xs, ys, str(label), index))
    return traces


def _all(counts: Mapping[str, int]) -> int:
    return sum(counts.values())
