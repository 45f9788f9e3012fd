"""Terminal output of the levels, modules and paths of a modular model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen

SHOWN = 32
"""Paths and modules that are shown with a row each; the dashboard shows all."""

HOLDERS = 6
"""Machines of a module that are named."""

STATE_STYLE = {
    "training": "cyan", "trained": "green", "done": "green", "lost": "red", "stopped": "yellow",
    "waiting": "dim",
}  # fmt: skip


def paths_part(paths: Mapping[str, Any]) -> RenderableType:
    """Return who holds which module, and a row per path.

    `paths` is the part of the hub's job view.
    """
    sizes = " x ".join(map(str, paths["modules"]))
    head = f"[dim]phase[/] {paths['phase']} of {paths['phases']}  [dim]modules[/] {sizes}"
    if paths["copies"] > 1:
        head += f", {paths['copies']} copies"
    parts: list[RenderableType] = [head, _modules(paths["levels"]), _paths(paths["paths"])]
    if len(paths["paths"]) > SHOWN:
        parts.append(f"[dim]and {len(paths['paths']) - SHOWN} more paths, on the page[/]")
    if paths["empty"]:
        parts.append(f"[red]empty shards[/]: {_numbers(paths['empty'])}")
    return Group(*parts)


def _modules(levels: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    table = _table()
    for heading in ("level", "module", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("paths", overflow="fold", max_width=18)
    table.add_column("held by", overflow="fold")
    rows = [(level, one) for level, modules in enumerate(levels) for one in modules]
    for level, one in rows[:SHOWN]:
        rounds = "-" if one["round"] is None else str(one["round"])
        held = escape(_few(one["holders"])) or "[dim]none[/]"
        table.add_row(str(level), str(one["module"]), rounds, _numbers(one["paths"]), held)
    return table


def _paths(paths: Sequence[Mapping[str, Any]]) -> Table:
    table = _table()
    table.add_column("path", justify="right", no_wrap=True)
    table.add_column("trained by", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("step", "tokens", "loss", "held-out", "best at"):
        table.add_column(heading, justify="right", no_wrap=True)
    sharded = any(one["documents"] is not None for one in paths)
    if sharded:
        table.add_column("docs", justify="right", no_wrap=True)
    for one in paths[:SHOWN]:
        style = STATE_STYLE[one["state"]]
        row = [
            str(one["path"]),
            escape(one["name"]) or "-",
            f"[{style}]{one['state']}[/]",
            str(one["step"]),
            screen.count(one["tokens"]),
            _loss(one["loss"]),
            _loss(one["held_out"]),
            _best(one),
        ]
        table.add_row(*row, *([str(one["documents"])] if sharded else []))
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim")


def _best(path: Mapping[str, Any]) -> str:
    """Return the least held-out loss and its step; marked if the path ends as it was then."""
    if path["best_step"] is None:
        return "-"
    text = f"{_loss(path['best'])} {path['best_step']}"
    return f"[yellow]{text}[/]" if path["stopped_early"] else text


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - HOLDERS
    return f"{', '.join(names[:HOLDERS])} and {rest} more" if rest > 1 else ", ".join(names)


def _numbers(numbers: Sequence[int]) -> str:
    """Return numbers with ranges, e.g. ``0-3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
