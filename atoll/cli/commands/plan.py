"""`atoll plan`: predict what a job needs before it runs."""

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
    help="Predict what a job needs before it runs.",
)


@app.callback()
def plan() -> None:
    """Predict what a job needs before it runs."""


@app.command("memory")
def memory(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A job file.")],
    memory_: Annotated[
        str,
        typer.Option("--memory", help="Memory limit per rank, e.g. 16GB (default: from [needs])."),
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE in the job; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Predict the memory of every rank of a member; nothing is allocated.

    Exits with status 1 when a rank needs more than there is, after naming the nearest change that
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


@app.command("pipeline")
def pipeline(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A job file.")],
    measured_: Annotated[
        Path | None,
        typer.Option("--measured", help="Measurements of an island instead of this machine's."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even if it was before.")] = False,
    memory_: Annotated[
        str, typer.Option("--memory", help="Memory limit per rank, e.g. 16GB (default: measured).")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE in the job; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Predict the time of a batch for every number of stages and replicas of a pipeline.

    Times of the model's units, of transfers and of reductions are measured on this machine, once
    for each model. The first line of the table is what an elastic island takes.

    Examples:
        atoll plan pipeline job.toml
        atoll plan pipeline job.toml --set island.ranks=4 --json
    """
    import dataclasses
    import json

    from atoll.cli.jobs.jobfile import Overrides, read_target
    from atoll.cli.views import screen
    from atoll.cli.views.pipeline_plan import page
    from atoll.plan.benchmarks import cache_path, measure_here, memory_of
    from atoll.plan.measured import read_measured, write_measured
    from atoll.plan.pipelines import Request, plan_pipelines

    spec = read_target(job, Overrides(settings=settings or ())).spec
    limit = parse_size(memory_) if memory_ else 0
    path = measured_ or cache_path(spec)
    found = None if again else read_measured(path)
    if found is None:
        found = measure_here(spec)
        write_measured(found, path)
    if limit:
        machines = [dataclasses.replace(one, memory_bytes=limit) for one in found.machines]
        found = dataclasses.replace(found, machines=tuple(machines))
    plans = plan_pipelines(found, Request.of(spec, memory=memory_of(spec)))
    if json_:
        figures = {
            "model": spec.model.name, "batch": spec.train.batch,
            "machines": [dataclasses.asdict(machine) for machine in found.machines],
            "plans": [dataclasses.asdict(plan) for plan in plans],
            "best": dataclasses.asdict(plans[0]),
        }  # fmt: skip
        typer.echo(json.dumps(figures, indent=1))
        return
    for drawn in page(spec, found, plans):
        screen.output().print(drawn)


def parse_size(text: str) -> int:
    """Return bytes from a size like `16GB`, `80 GiB` or `500MB`; a bare number is GB.

    Raises:
        ConfigError: it is not such a size, or not above 0.
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
    """Return the memory limit that the job itself sets; 0: none."""
    needs = found.spec.needs
    return round(1e9 * (needs.memory_gb if found.device == "cpu" else needs.gpu_memory_gb))


def _figures(found: MemoryPlan, *, limit: int, change: Change | None) -> dict[str, Any]:
    """Return the plan as values for JSON."""
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
