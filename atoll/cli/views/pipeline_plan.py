"""Terminal output of the plans of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen

if TYPE_CHECKING:
    from atoll.config import JobSpec
    from atoll.plan.measured import Measured
    from atoll.plan.pipelines import PipelinePlan


def page(
    spec: JobSpec, measured: Measured, plans: Sequence[PipelinePlan]
) -> Iterator[RenderableType]:
    """Yield the output: machines and links, a line for each plan, and the choice."""
    machines = ", ".join(
        f"{escape(machine.name)} ({machine.ranks} ranks"
        + (f", {machine.cores} cores" if machine.cores else "")
        + (f", speed {machine.speed:.2f}" if machine.speed != 1.0 else "")
        + ")"
        for machine in measured.machines
    )
    yield f"{escape(spec.model.name)}, {spec.train.batch} rows; {spec.island.schedule}; {machines}"
    names = {"near": "within a machine", "far": "between machines"}
    for name, words in names.items():
        link = getattr(measured, name)
        if name == "near" or len(measured.machines) > 1:
            rate = screen.size(round(min(link.bytes_per_s, 1e15)))
            yield f"[dim]{words}: {1e3 * link.latency_s:.2f} ms, {rate}/s[/]"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    headings = (
        "stages", "replicas", "rows", "microbatches", "order", "predicted", "reduce", "memory",
        "cuts",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cuts" else "right")
    for plan in plans:
        table.add_row(
            str(plan.stages), str(plan.replicas), str(plan.rows), str(plan.microbatches),
            plan.schedule if plan.stages > 1 else "-",
            f"{plan.predicted_s:.4f} s", f"{plan.reduce_s:.4f} s",
            screen.size(plan.worst_bytes) if plan.worst_bytes else "-",
            " ".join(map(str, plan.cuts)) or "-", style="bold" if plan is plans[0] else "",
        )  # fmt: skip
    yield table
    best = plans[0]
    yield (
        f"[green]picks[/] {_of(best.stages, 'stage')} x {_of(best.replicas, 'replica')}: "
        f"{_of(best.microbatches, 'microbatch')} of {_of(best.rows, 'row')}, "
        f"{best.predicted_s:.4f} s per batch"
    )


def _of(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{ending}"
