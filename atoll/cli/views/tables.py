"""Tables of nodes and jobs, drawn from the hub's views."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen
from atoll.cli.views.job import Watched, shown_job_state
from atoll.cli.views.members import members_table
from atoll.cli.views.paths import paths_part
from atoll.cli.views.swarm import stages_part
from atoll.wire.states import JobState, NodeState

NODE_STYLE: dict[str, str] = {NodeState.ONLINE: "green", NodeState.LOST: "red"}


def nodes_table(nodes: Sequence[dict[str, Any]]) -> RenderableType:
    """Return the machines that have joined."""
    if not nodes:
        return "no machine has joined yet; on each: atoll join TICKET"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in (
        "node",
        "state",
        "last seen",
        "cores",
        "memory",
        "device",
        "matmul",
        "torch",
        "running",
    ):
        table.add_column(heading)
    for node in nodes:
        info = node["info"]
        state = _node_state(node)
        speed = info.get("matmul_gflops") or 0.0
        table.add_row(
            escape(node["node"]),
            f"[{NODE_STYLE.get(state, 'yellow')}]{escape(state)}[/]",
            f"{node['last_seen_s']:.0f} s",
            str(info["cores"]),
            screen.size(info["memory_bytes"]),
            escape(_device(info)),
            f"{speed:.0f} GFLOP/s" if speed else "-",
            escape(info["torch"] or "none"),
            escape(", ".join(node["running"]) or "-"),
        )
    idle = [f"{node['node']}: {node['info']['idle']}" for node in nodes if node["info"].get("idle")]
    return Group(table, *(Text(line, style="yellow") for line in idle))


def _device(info: dict[str, Any]) -> str:
    """Return the device of a node's jobs."""
    return str(info.get("computes_on") or info.get("gpu") or "-")


def _node_state(node: dict[str, Any]) -> str:
    """Return the state of a node, with the reason if it takes no work."""
    paused = (node["info"].get("offer") or {}).get("paused")
    if node["state"] == NodeState.ONLINE and paused:
        return str(paused)
    return (
        "draining"
        if node.get("draining") and node["state"] == NodeState.ONLINE
        else str(node["state"])
    )


FAILURES_SHOWN = 5
"""Failed jobs whose last lines `atoll status` shows; the newest are of interest."""

LINES_OF_FAILURE = 5


def jobs_table(jobs: Sequence[dict[str, Any]]) -> RenderableType:
    """Return the jobs, newest first; columns with one value for all jobs are left out."""
    if not jobs:
        return "no job yet; submit one: atoll run demo"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    extra = [name for name in ("priority", "batch") if any(view.get(name) for view in jobs)]
    table.add_column("job", no_wrap=True)  # other commands take this name
    table.add_column("state", no_wrap=True)
    for heading in (*extra, "where", "nodes", "step", "rounds", "loss", "took"):
        table.add_column(heading)
    for view in jobs:
        table.add_row(*_job_row(view, extra))
    return table


def _job_row(view: dict[str, Any], extra: Sequence[str]) -> list[str]:
    watched = Watched(view["job"], view=view)
    losses = [m["loss"] for m in view["members"] if m.get("loss") is not None]
    ended = view.get("ended") or time.time()
    return [
        escape(view["job"]),
        escape(shown_job_state(view)),
        *(escape(str(view.get(name) or "-")) for name in extra),
        escape(_where(view)),
        f"{view['nodes_wanted']}{_each(view)}",
        f"{watched.step}/{watched.steps}" if watched.steps else str(watched.step or "-"),
        str(view["committed_round"]),
        f"{sum(losses) / len(losses):.3f}" if losses else "-",
        screen.duration(ended - view["started"]) if view.get("started") else "-",
    ]


def remarks(jobs: Sequence[dict[str, Any]]) -> RenderableType:
    """Return why jobs wait or are paused, and the last lines of the newest failed ones."""
    parts: list[RenderableType] = []
    for view in jobs:
        state, reason = shown_job_state(view), view.get("reason") or view.get("paused_reason")
        if state in (JobState.WAITING, JobState.RUNNING, "paused") and reason:
            parts.append(f"[bold]{escape(view['job'])}[/] {escape(state)}: {escape(str(reason))}")
    return Group(*parts, failures(jobs))


def failures(jobs: Sequence[dict[str, Any]], *, lines: int = LINES_OF_FAILURE) -> RenderableType:
    """Return the last lines of the newest failed jobs, and the remedies."""
    parts: list[RenderableType] = []
    for view in [view for view in jobs if view["state"] == JobState.FAILED][:FAILURES_SHOWN]:
        where = f"{view.get('failed_member')} on {view.get('failed_node')}"
        parts.append(
            f"[bold]{escape(view['job'])}[/] [red]failed[/]{_exit(view)}: "
            f"{escape(view.get('reason') or 'no reason is known')}"
        )
        printed = [str(line) for line in view.get("last_lines") or []][-lines:]
        if printed:
            parts.append(Text(f"  last lines of {where}:", style="dim"))
            parts += [Text(f"    {line}", style="dim") for line in printed]
        remedy = (view.get("error") or {}).get("remedy")
        if remedy:
            parts.append(f"  [dim]what to do:[/] {escape(remedy)}")
    return Group(*parts)


def _exit(view: dict[str, Any]) -> str:
    code = view.get("exit_code")
    return f" [red]exit status {code}[/]" if code and view["state"] == JobState.FAILED else ""


def _each(view: dict[str, Any]) -> str:
    """Return how many machines each member takes, if more than one."""
    machines = view.get("machines", 1)
    return f" x {machines}" if machines > 1 else ""


def _where(view: dict[str, Any]) -> str:
    """Return the nodes of a job, shortened."""
    places = [str(place) for place in view.get("places") or []]
    return ", ".join(places[:4]) + (" ..." if len(places) > 4 else "") or "-"


def job_table(view: dict[str, Any]) -> RenderableType:
    """Return one job in full."""
    head = Table.grid(padding=(0, 2))
    reason = f" ({view['reason']})" if view.get("reason") else ""
    bounds = str(view["nodes_wanted"])
    if view.get("min_nodes"):
        bounds = f"{view['min_nodes']} to {bounds}"
    head.add_row("job", f"[bold]{escape(view['job'])}[/]")
    head.add_row("state", escape(shown_job_state(view) + reason))
    head.add_row("kind", str(view.get("kind", "trainer")))
    head.add_row("members", f"{bounds}, on {escape(_where(view))}")
    if each := " · ".join(filter(None, [view.get("island"), view.get("inner")])):
        head.add_row("island", f"each member: {escape(each)}")
    head.add_row("priority", str(view.get("priority", 0)))
    if view.get("batch"):
        head.add_row("batch", escape(view["batch"]))
    if view.get("retries"):
        head.add_row("retries", f"{view.get('retried', 0)} of {view['retries']} used")
    head.add_row("created", screen.moment(view.get("created")))
    head.add_row("started", screen.moment(view.get("started")))
    head.add_row("ended", screen.moment(view.get("ended")))
    head.add_row("rounds", f"{view['committed_round']} committed, {view['aborted_rounds']} aborted")
    processes = Watched(view["job"], view=view).processes
    parts: list[RenderableType] = [head]
    if view.get("swarm") is not None:
        parts.append(stages_part(view["swarm"]))
    if view.get("paths") is not None:
        parts.append(paths_part(view["paths"]))
    parts.append(members_table(processes))
    if view["state"] == JobState.FAILED:
        parts.append(failures([view], lines=len(view.get("last_lines") or [])))
    return Group(*parts)
