"""Tables of nodes and jobs, drawn from the hub's views."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli import screen
from atoll.cli.live import members_table
from atoll.cli.watch import Watched, shown_job_state


def nodes_table(nodes: Sequence[dict[str, Any]]) -> RenderableType:
    """Return the machines that have joined."""
    if not nodes:
        return "no machine has joined yet; on each: atoll join TICKET"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("node", "state", "last seen", "cores", "memory", "matmul", "torch", "running"):
        table.add_column(heading)
    for node in nodes:
        info = node["info"]
        state = "draining" if node.get("draining") and node["state"] == "online" else node["state"]
        speed = info.get("matmul_gflops") or 0.0
        table.add_row(
            escape(node["node"]),
            f"[{'green' if state == 'online' else 'red'}]{escape(state)}[/]",
            f"{node['last_seen_s']:.0f} s",
            str(info["cores"]),
            screen.size(info["memory_bytes"]),
            f"{speed:.0f} GFLOP/s" if speed else "-",
            escape(info["torch"] or "none"),
            escape(", ".join(node["running"]) or "-"),
        )
    return table


def jobs_table(jobs: Sequence[dict[str, Any]]) -> RenderableType:
    """Return the jobs, newest first."""
    if not jobs:
        return "no job yet; submit one: atoll run examples/gpt.toml"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("job", "state", "nodes", "step", "rounds", "loss", "started", "took"):
        table.add_column(heading)
    for view in jobs:
        watched = Watched(view["job"], view=view)
        losses = [m["loss"] for m in view["members"] if m.get("loss") is not None]
        ended = view.get("ended") or time.time()
        reason = f" [dim]{escape(view['reason'])}[/]" if view.get("reason") else ""
        table.add_row(
            escape(view["job"]),
            escape(shown_job_state(view)) + reason,
            str(view["nodes_wanted"]),
            f"{watched.step}/{watched.steps}" if watched.steps else str(watched.step),
            str(view["committed_round"]),
            f"{sum(losses) / len(losses):.3f}" if losses else "-",
            screen.moment(view.get("started")),
            screen.duration(ended - view["started"]) if view.get("started") else "-",
        )
    return table


def job_table(view: dict[str, Any]) -> RenderableType:
    """Return one job in detail."""
    head = Table.grid(padding=(0, 2))
    reason = f" ({view['reason']})" if view.get("reason") else ""
    head.add_row("job", f"[bold]{escape(view['job'])}[/]")
    head.add_row("state", escape(shown_job_state(view) + reason))
    head.add_row("created", screen.moment(view.get("created")))
    head.add_row("started", screen.moment(view.get("started")))
    head.add_row("ended", screen.moment(view.get("ended")))
    head.add_row("rounds", f"{view['committed_round']} committed, {view['aborted_rounds']} aborted")
    members = sorted(view["members"], key=lambda member: int(member["slot"]))
    return Group(head, members_table(members))
