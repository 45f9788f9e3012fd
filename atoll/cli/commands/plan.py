"""`atoll plan`: what a job would need, found out before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atoll.plan.memory import MemoryPlan
    from atoll.plan.remedies import Change


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    help="Find out what a job would need before it runs.",
)


@app.callback()
def plan() -> None:
    """Find out what a job would need before it runs."""


@app.command("memory")
def memory(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A job file.")],
    memory_: Annotated[
        str,
        typer.Option(
            "--memory", help="What a rank may take, e.g. 16GB (default: what [needs] says)."
        ),
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE in the job; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Predict the memory of every rank of a member; nothing is allocated.

    Leaves with status 1 when a rank needs more than there is, after naming the nearest change that
    makes it fit.

    Examples:
      atoll plan memory job.toml
      atoll plan memory job.toml --memory 16GB --set train.batch=32
    """
    import json

    from atoll.cli.jobs.jobfile import Overrides, read_target
    from atoll.cli.views import screen
    from atoll.cli.views.memory_plan import page
    from atoll.plan.memory import plan_memory, sizes_of
    from atoll.plan.remedies import nearest_change

    spec = read_target(job, Overrides(settings=settings or ())).spec
    wanted = parse_size(memory_) if memory_ else 0
    data = sizes_of(spec) if spec.kind == "trainer" else None
    found = plan_memory(spec, data=data)
    limit = wanted or _needed(found)
    fits = not limit or found.worst_bytes <= limit
    change = None if fits else nearest_change(found, limit_bytes=limit, data=data)
    if json_:
        typer.echo(json.dumps(_figures(found, limit=limit, change=change), indent=1))
    else:
        for drawn in page(found, limit=limit, change=change):
            screen.output().print(drawn)
    if not fits:
        raise typer.Exit(1)


def parse_size(text: str) -> int:
    """Return bytes from what people write: `16GB`, `80 GiB`, `500MB`; a bare number is GB.

    Raises:
        ConfigError: it is no such size, or not above 0.
    """
    from atoll.errors import ConfigError

    plain = text.strip().lower().replace(" ", "").removesuffix("b")
    units = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    units |= {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    unit = next((unit for unit in units if plain.endswith(unit)), "")
    try:
        value = float(plain.removesuffix(unit)) * units.get(unit, 10**9)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise ConfigError("this size cannot be read", given=repr(text), expected="e.g. 16GB")
    return round(value)


def _needed(found: MemoryPlan) -> int:
    """Return what the job itself says that a process may use; 0: nothing."""
    needs = found.spec.needs
    return round(1e9 * (needs.memory_gb if found.device == "cpu" else needs.gpu_memory_gb))


def _figures(found: MemoryPlan, *, limit: int, change: Change | None) -> dict[str, Any]:
    """Return everything for JSON."""
    ranks = [
        {
            **rank.figures(),
            "main_bytes": found.main_bytes(rank),
            "device_bytes": found.device_bytes(rank),
        }
        for rank in found.ranks
    ]
    return {
        "model": found.spec.model.name, "parameters": found.elements,
        "mesh": str(found.spec.mesh), "device": found.device, "rows": found.rows,
        "held": found.held, "cuts": list(found.cuts), "cuts_guessed": found.guessed,
        "ranks": ranks, "worst_bytes": found.worst_bytes, "limit_bytes": limit,
        "fits": not limit or found.worst_bytes <= limit,
        "change": {"words": change.words, "worst_bytes": change.worst_bytes} if change else None,
    }  # fmt: skip


PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "buffers",
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
    """Yield what is printed: the job, its ranks, the first rank, the verdict."""
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
    """Return one column for each kind of rank, one line for each part."""
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
    """Return ranks that need the same together."""
    kinds: dict[tuple[int, ...], list[RankMemory]] = {}
    for rank in found.ranks:
        kinds.setdefault(tuple(getattr(rank, part) for part in PARTS), []).append(rank)
    return list(kinds.values())


def _numbers(alike: list[RankMemory]) -> str:
    """Return numbers as `0-3` where they follow each other, else as `1, 3`."""
    numbers = [rank.rank for rank in alike]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _place(found: MemoryPlan, alike: list[RankMemory]) -> str:
    """Return the coordinates that ranks have in common, on axes with several ranks."""
    sizes = zip(AXES, found.spec.mesh.sizes, strict=True)
    at = {axis: {rank.place[axis] for rank in alike} for axis, size in sizes if size > 1}
    common = [f"{axis} {min(places)}" for axis, places in at.items() if len(places) == 1]
    return ", ".join(common) or "all"


def _notes(found: MemoryPlan) -> Iterator[str]:
    """Yield what the columns leave open."""
    program = f"Python and torch themselves ({screen.size(PROGRAM_BYTES)})"
    yield f"[dim]main memory: with {program}; a round and a checkpoint are between steps[/]"
    if found.guessed:
        yield (
            f"[dim]stages cut before units {', '.join(map(str, found.cuts))}, by their weights; "
            "a run measures: set cuts in \\[island] to be sure[/]"
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
