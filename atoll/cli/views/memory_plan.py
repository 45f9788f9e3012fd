"""Terminal output of a memory plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen
from atoll.config import AXES

if TYPE_CHECKING:
    from atoll.plan.memory import MemoryPlan
    from atoll.plan.ranks import RankMemory
    from atoll.plan.remedies import Change


PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "buffers",
    "stashed": "older weights",
    "gathered": "gathered",
    "copies": "half-precision copies",
    "activations": "activations",
    "working": "working",
    "host_model": "host model",
    "outer": "outer state",
    "exchange": "a round",
    "image": "copy for checkpoints",
    "checkpoint": "a checkpoint",
}
"""Field of a rank's memory -> heading of its column."""


def page(found: MemoryPlan, *, limit: int, change: Change | None) -> Iterator[RenderableType]:
    """Yield the output: the job, its ranks, the first rank, the verdict."""
    train = found.spec.train
    rows = f"{found.rows} of {train.batch} rows at once"
    kept = f", {found.held} passes kept" if found.held > 1 else ""
    yield (
        f"{escape(found.spec.model.name)}, {screen.count(found.elements)} parameters; "
        f"{found.spec.mesh}; {train.precision}, {escape(train.optimizer)}, {rows}{kept}"
    )
    yield _table(found)
    yield from _notes(found)
    if limit:
        yield from _verdict(found, limit=limit, change=change)


def _table(found: MemoryPlan) -> Table:
    """Return a column for each kind of rank and a line for each part."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    kinds = _alike(found)
    for alike in kinds:
        table.add_column(f"rank {_numbers(alike)}", justify="right")
    if found.several:
        table.add_row("[dim]place[/]", *(f"[dim]{_place(found, alike)}[/]" for alike in kinds))
    for part, heading in PARTS.items():
        sizes = [getattr(alike[0], part) for alike in kinds]
        if any(sizes):
            table.add_row(heading, *(screen.size(size) if size else "-" for size in sizes))
    totals = {"main memory": found.main_bytes}
    if found.device != "cpu":
        totals["accelerator"] = found.device_bytes
    for heading, count in totals.items():
        sizes = [count(alike[0]) for alike in kinds]
        table.add_row(heading, *map(screen.size, sizes), style="bold")
    return table


def _alike(found: MemoryPlan) -> list[list[RankMemory]]:
    """Group ranks with equal needs."""
    kinds: dict[tuple[int, ...], list[RankMemory]] = {}
    for rank in found.ranks:
        kinds.setdefault(tuple(getattr(rank, part) for part in PARTS), []).append(rank)
    return list(kinds.values())


def _numbers(alike: list[RankMemory]) -> str:
    """Format numbers as `0-3` if consecutive, else as `1, 3`."""
    numbers = [rank.rank for rank in alike]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _place(found: MemoryPlan, alike: list[RankMemory]) -> str:
    """Return the coordinates common to the ranks, on axes with several ranks."""
    sizes = zip(AXES, found.spec.mesh.sizes, strict=True)
    at = {axis: {rank.place[axis] for rank in alike} for axis, size in sizes if size > 1}
    common = [f"{axis} {min(places)}" for axis, places in at.items() if len(places) == 1]
    return ", ".join(common) or "all"


def _notes(found: MemoryPlan) -> Iterator[str]:
    """Yield remarks on the columns."""
    from atoll.plan.memory import PROGRAM_BYTES

    program = f"Python and torch themselves ({screen.size(PROGRAM_BYTES)})"
    yield f"[dim]main memory: with {program}; a round and a checkpoint are between steps[/]"
    if found.guessed:
        yield (
            f"[dim]stages cut before units {', '.join(map(str, found.cuts))}, by their weights; "
            "a run measures: set cuts in \\[island] to fix them[/]"
        )


def _verdict(found: MemoryPlan, *, limit: int, change: Change | None) -> Iterator[str]:
    where = "main memory" if found.device == "cpu" else "accelerator memory"
    need = f"{screen.size(found.worst_bytes)} of {screen.size(limit)} {where}"
    if found.worst_bytes <= limit:
        yield f"[green]fits[/]: {need} by the rank that needs most"
        return
    yield f"[red]does not fit[/]: {need} by the rank that needs most"
    if change is None:
        yield "  no change of precision, recomputation, rows or shards makes it fit"
    else:
        yield f"  fits with {escape(change.words)}: {screen.size(change.worst_bytes)}"
