"""Terminal output of the stages of a SWARM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen
from atoll.swarm.rebalance import rate_text

MOVES_SHOWN = 3
STATE_STYLE = {"ready": "green", "recovering": "yellow", "banned": "red"}


def stages_part(swarm: Mapping[str, Any]) -> RenderableType:
    """Return a row per member by stage, why it is paused, and the newest changes of places.

    `swarm` is the part of the hub's job view.
    """
    parts: list[RenderableType] = [
        f"[dim]stages at step[/] {swarm['step']}  "
        f"[dim]microbatches/s[/] [bold]{rate_text(swarm['microbatches_per_s'])}[/]"
        + _measured(swarm)
    ]
    if swarm["paused"]:
        parts.append(f"[yellow]paused[/]: {escape(swarm['paused'])}")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("done", justify="right", no_wrap=True)
    table.add_column("machine", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("rows/s", "queue", "paths"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("direct", justify="right", no_wrap=True)
    for stage in swarm["stages"]:
        for row in _rows(stage, microbatches=swarm["microbatches"]):
            table.add_row(*row)
    parts.append(table)
    for names, words in ((swarm["whole"], "whole model"), (swarm["coming"], "no stage fits")):
        if names:
            parts.append(f"[dim]{words}:[/] {escape(', '.join(names))}")
    for move in swarm["moves"][-MOVES_SHOWN:]:
        why = f", {move['reason']}" if move["reason"] else ""
        places = f"stage {move['source']} -> {move['target']}"
        said = f"{move['name']}: {places}{why}"
        parts.append(f"[dim]{escape(said)}[/]")
    return Group(*parts)


def _measured(swarm: Mapping[str, Any]) -> str:
    """Return how far the evaluation of the present state is, if it is evaluated."""
    count = swarm["to_measure"]
    return f"  [dim]held-out[/] {swarm['measured']}/{count}" if count else ""


def _rows(stage: Mapping[str, Any], *, microbatches: int) -> Iterator[list[str]]:
    counted = f"{stage['counted']}/{microbatches}"
    name = f"{stage['stage']} [yellow]slow[/]" if stage["slowest"] else str(stage["stage"])
    if not stage["peers"]:
        needs = f"needs {screen.size(stage['needs_bytes'])}" if stage["needs_bytes"] else ""
        yield [name, counted, needs, "[red]no member[/]", "-", "-", "-", "-"]
    for number, peer in enumerate(stage["peers"]):
        style = STATE_STYLE[peer["state"]]
        rate, share = peer["rows_per_s"], peer["share"]
        yield [
            "" if number else name,
            "" if number else counted,
            escape(peer["name"]),
            f"[{style}]{peer['state']}[/]",
            "-" if rate is None else rate_text(rate),
            f"{peer['queue']:.0f}",
            "-" if share is None else f"{share:.0%}",
            "-" if peer["direct"] is None else f"{peer['direct']:.0%}",
        ]
