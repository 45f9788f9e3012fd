"""Tables of nodes and jobs, drawn from the hub's views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen
from atoll.cli.views.job import Watched, shown_job_state, why_not_yet
from atoll.cli.views.members import members_table
from atoll.cli.views.paths import paths_part
from atoll.cli.views.progress import bar, figures
from atoll.cli.views.swarm import stages_part
from atoll.ids import by_number
from atoll.wire.states import JobState, NodeState

NODE_STYLE: dict[str, str] = {
    NodeState.ONLINE: "green", NodeState.LOST: "red", NodeState.LEFT: "dim",
    NodeState.DRAINED: "dim",
}  # fmt: skip
JOB_STYLE: dict[str, str] = {
    JobState.RUNNING: "green", JobState.FAILED: "red", JobState.WAITING: "yellow",
    "paused": "yellow", JobState.STOPPED: "dim",
}  # fmt: skip


WIDE = 110
"""Columns of a terminal from which on tables show more than the essential."""

NARROW = {"node": 18, "state": 11, "device": 10, "runs": 26}
ROOMY = {"device": 24, "runs": 30}
"""Most columns of a cell, in 80 columns and in more; longer texts end with dots."""


def nodes_table(nodes: Sequence[dict[str, Any]], *, width: int = 80) -> RenderableType:
    """Return the machines that have joined, one line each."""
    if not nodes:
        return "no machine has joined yet; on each: atoll join TICKET"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    versions = {str(node["info"]["torch"] or "none") for node in nodes}
    more = (["matmul"] if width >= WIDE else []) + (["torch"] if len(versions) > 1 else [])
    sizes = ["cores", "memory"] if width >= WIDE else []
    for heading in ("node", "state", "last seen", *sizes, "device", *more, "runs"):
        widest = NARROW if width < WIDE else ROOMY
        table.add_column(heading, no_wrap=True, max_width=widest.get(heading))
    for node in sorted(nodes, key=lambda node: by_number(node["node"])):
        info, state = node["info"], _node_state(node)
        speed = info.get("matmul_gflops") or 0.0
        extra = {
            "matmul": screen.gflops(speed) if speed else "-",
            "torch": escape(info["torch"] or "none"),
            "cores": str(info["cores"]),
            "memory": screen.size(info["memory_bytes"]),
        }
        table.add_row(
            escape(node["node"]),
            f"[{NODE_STYLE.get(state, 'yellow')}]{escape(state)}[/]",
            screen.ago(node["last_seen_s"]),
            *(extra[name] for name in sizes),
            escape(_device(info)),
            *(extra[name] for name in more),
            escape(_runs(node["running"])),
        )
    idle = [f"{node['node']}: {node['info']['idle']}" for node in nodes if node["info"].get("idle")]
    return Group(table, *(Text(line, style="yellow") for line in idle))


def _runs(processes: Sequence[str]) -> str:
    """Return the jobs of a machine, each once: how many more there are, and the first of them."""
    jobs = list(dict.fromkeys(process.partition("/")[0] for process in processes))
    return f"{len(jobs)}: {jobs[0]} ..." if len(jobs) > 1 else (jobs or ["-"])[0]


def _device(info: dict[str, Any]) -> str:
    """Return the device of a node's jobs."""
    return str(info.get("computes_on") or info.get("gpu") or "-")


def _node_state(node: dict[str, Any]) -> str:
    """Return the state of a node, with the reason if it takes no work."""
    state = str(node.get("shown") or node["state"])
    return str((node["info"].get("offer") or {})["paused"]) if state == NodeState.PAUSED else state


FAILURES_SHOWN = 5
"""Failed jobs whose last lines `atoll status` shows; the newest are of interest."""

LINES_OF_FAILURE = 5


def jobs_table(jobs: Sequence[dict[str, Any]], *, width: int = 80) -> RenderableType:
    """Return the jobs, newest first, one line each; a wide terminal shows where they run too."""
    if not jobs:
        return "no job yet; submit one: atoll run demo"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    extra = [name for name in ("priority", "batch") if any(view.get(name) for view in jobs)]
    extra = [*extra, "nodes", "rounds", "where"] if width >= WIDE else []
    table.add_column("job", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("%", "loss", "ETA", "elapsed"):
        table.add_column(heading, no_wrap=True, justify="right")
    for heading in extra:
        table.add_column(heading, no_wrap=True)
    for view in jobs:
        table.add_row(*_job_row(view, extra))
    return table


def _job_row(view: dict[str, Any], extra: Sequence[str]) -> list[str]:
    watched, state = Watched.of(view), shown_job_state(view)
    facts = {
        "priority": str(view.get("priority") or "-"),
        "batch": str(view.get("batch") or "-"),
        "nodes": f"{view['nodes_wanted']}{_each(view)}",
        "rounds": str(view["committed_round"]),
        "where": _where(view),
    }
    return [
        escape(view["job"]),
        f"[{JOB_STYLE.get(state, 'default')}]{escape(state)}[/]",
        "-" if watched.share is None else f"{math.floor(100 * watched.share)}",
        "-" if watched.loss is None else f"{watched.loss:.3f}",
        screen.duration(watched.left_s) if state == JobState.RUNNING else "-",
        screen.duration(watched.training_s),
        *(escape(facts[name]) for name in extra),
    ]


def remarks(jobs: Sequence[dict[str, Any]]) -> RenderableType:
    """Return why jobs wait or are paused, and the last lines of the newest failed ones."""
    parts: list[RenderableType] = []
    for view in jobs:
        state, reason = shown_job_state(view), why_not_yet(view)
        if state in (JobState.WAITING, JobState.RUNNING, "paused") and reason:
            parts.append(f"[bold]{escape(view['job'])}[/] {escape(state)}: {escape(str(reason))}")
    return Group(*parts, failures(jobs))


def failures(jobs: Sequence[dict[str, Any]], *, lines: int = LINES_OF_FAILURE) -> RenderableType:
    """Return the last lines of the newest failed jobs, and the remedies."""
    parts: list[RenderableType] = []
    for view in [view for view in jobs if view["state"] == JobState.FAILED][:FAILURES_SHOWN]:
        parts.append(
            f"[bold]{escape(view['job'])}[/] [red]failed[/]{_exit(view)}: "
            f"{escape(view.get('reason') or 'no reason is known')}"
        )
        printed = [str(line) for line in view.get("last_lines") or []][-lines:]
        if printed:
            parts.append(Text(f"  its last lines on {view.get('failed_node')}:", style="dim"))
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
    watched = Watched.of(view)
    parts: list[RenderableType] = [_facts(view)]
    begun = view["state"] != JobState.WAITING
    if begun and (watched.share is not None or watched.step):
        parts += ["", bar(watched), figures(watched)]
    parts.append("")
    if view.get("swarm") is not None:
        parts.append(stages_part(view["swarm"]))
    if view.get("paths") is not None:
        parts.append(paths_part(view["paths"]))
    if watched.processes:
        parts.append(members_table(watched.processes))
    return Group(*parts)


def _facts(view: dict[str, Any]) -> RenderableType:
    """Return what is known of a job, one fact a line; what does not apply is left out."""
    state = shown_job_state(view)
    reason = "" if state == JobState.FAILED else why_not_yet(view)  # which is shown last
    each = " · ".join(filter(None, [view.get("island"), view.get("inner")]))
    rounds = f"{view['committed_round']} committed, {view['aborted_rounds']} aborted"
    facts = {
        "state": f"{state}: {reason}" if reason else state,
        "kind": view.get("kind", "trainer"),
        "members": _bounds(view),
        "island": f"each member: {each}" if each else "",
        "priority": view.get("priority"),
        "batch": view.get("batch"),
        "retries": _retries(view),
        **{
            name: screen.moment(view[name]) if view.get(name) else ""
            for name in ("created", "started", "ended")
        },
        "rounds": rounds if view["committed_round"] or view["aborted_rounds"] else "",
    }
    table = Table.grid(padding=(0, 2))
    table.add_row("job", f"[bold]{escape(view['job'])}[/]")
    for name, value in facts.items():
        if value:
            table.add_row(name, escape(str(value)))
    return table


def _bounds(view: dict[str, Any]) -> str:
    """Return how many members a job has, and where they are."""
    least, most = view.get("min_nodes"), view["nodes_wanted"]
    bounds = f"{least} to {most}" if least and least != most else str(most)
    return f"{bounds}, on {_where(view)}" if view.get("places") else bounds


def _retries(view: dict[str, Any]) -> str:
    wanted = view.get("retries")
    return f"{view.get('retried', 0)} of {wanted} used" if wanted else ""
