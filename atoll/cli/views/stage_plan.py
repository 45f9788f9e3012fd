"""Terminal output of the memory of a SWARM's stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen

if TYPE_CHECKING:
    from atoll.plan.swarm import StagePlan, SwarmPlan

PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "buffers",
    "inputs": "kept inputs",
    "pending": "pending gradients",
    "other_step": "weights and sum of another step",
    "activations": "activations",
    "working": "working",
}
"""Field of a stage's memory -> heading of its line."""
BESIDE = {
    "round_bytes": "a round",
    "copies_bytes": "copies of sums",
    "images_bytes": "copies of the state",
    "building_bytes": "(to build it)",
}
"""Field of a stage with main memory -> heading of its line."""


def page(
    found: SwarmPlan, *, limit: int, fitting: SwarmPlan | None
) -> Iterator[RenderableType]:  # fmt: skip
    """Yield the output: the job, its stages, what the largest needs, the verdict.

    `fitting` is a plan with other stages that fit the limit.
    """
    spec = found.spec
    yield (
        f"{escape(spec.model.name)}, {screen.count(found.elements)} parameters in "
        f"{len(found.stages)} of at most {found.most_stages} stages; {spec.train.precision}, "
        f"{escape(spec.train.optimizer)}, {found.rows} row{'s' if found.rows > 1 else ''} at once"
    )
    yield _table(found)
    yield from _notes(found)
    where = "main memory" if found.device == "cpu" else "accelerator memory"
    need = screen.size(found.worst_bytes)
    yield f"[bold]the largest is stage {found.worst}: a machine with {need} of {where} fits all[/]"
    if not limit:
        return
    if found.worst_bytes <= limit:
        yield f"[green]fits[/]: {need} of {screen.size(limit)} {where}"
        return
    yield f"[red]does not fit[/]: {need} of {screen.size(limit)} {where}"
    if fitting is None:
        yield "  no number of stages makes it fit: fewer rows in a microbatch, or a smaller model"
    else:
        yield (
            f"  fits with stages = {len(fitting.stages)} in \\[swarm]: "
            f"{screen.size(fitting.worst_bytes)}"
        )


def _table(found: SwarmPlan) -> Table:
    """Return a column for each kind of stage and a line for each part."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    kinds = _alike(found)
    for numbers, _ in kinds:
        table.add_column(f"stage {_numbers(numbers)}", justify="right")
    stages = [stage for _, stage in kinds]
    table.add_row("[dim]units[/]", *(f"[dim]{escape(stage.words)}[/]" for stage in stages))
    most = max(stage.flops for stage in stages)
    if most:
        shares = (f"{stage.flops / most:.0%}" for stage in stages)
        table.add_row("work, of the most", *shares)
    for part, heading in PARTS.items():
        sizes = [getattr(stage.memory, part) for stage in stages]
        if any(sizes):
            table.add_row(heading, *(screen.size(size) if size else "-" for size in sizes))
    for part, heading in BESIDE.items():
        sizes = [getattr(stage, part) for stage in stages]
        if any(sizes):
            table.add_row(heading, *(screen.size(size) if size else "-" for size in sizes))
    totals = {"main memory": found.main_bytes}
    if found.device != "cpu":
        totals["accelerator"] = found.needs_bytes
    for heading, count in totals.items():
        table.add_row(heading, *(screen.size(count(stage)) for stage in stages), style="bold")
    return table


def _alike(found: SwarmPlan) -> list[tuple[list[int], StagePlan]]:
    """Group stages with equal needs that follow each other."""
    kinds: list[tuple[list[int], StagePlan]] = []
    for number, stage in enumerate(found.stages):
        if kinds and kinds[-1][1] == stage:
            kinds[-1][0].append(number)
        else:
            kinds.append(([number], stage))
    return kinds


def _numbers(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _notes(found: SwarmPlan) -> Iterator[str]:
    """Yield remarks on the lines."""
    yield (
        f"[dim]work: {found.balance:.0%} of what the same members could do if all stages had as "
        "much[/]"
    )
    from atoll.plan.memory import PROGRAM_BYTES
    from atoll.plan.swarm import HELD, PENDING

    yield (
        f"[dim]of a member: the inputs of {HELD} microbatches, gradients of {PENDING} that are not "
        f"counted yet; with Python and torch ({screen.size(PROGRAM_BYTES)})[/]"
    )
    if found.whole:
        yield (
            f"[dim]to start, a member builds the whole model, {screen.size(found.model_bytes)}: "
            f"{escape(found.whole)}[/]"
        )
    else:
        yield "[dim]no member builds more of the model than its stage[/]"
