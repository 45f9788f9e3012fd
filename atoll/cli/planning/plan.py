"""`atoll plan`: predict what a job needs before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from atoll.config import JobSpec
    from atoll.plan.memory import MemoryPlan
    from atoll.plan.remedies import Change


class JobFirst(TyperGroup):
    """A group whose first word may be a job file instead of a command: `atoll plan job.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command before the words of a job file."""
        if args and args[0] not in (*self.commands, "--help"):
            args = ["job", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=JobFirst,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    help="Predict what a job needs before it runs.",
)


@app.callback()
def plan() -> None:
    """Predict what a job needs before it runs."""


@app.command("job")
def job(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A job file.")],
    machines: Annotated[
        Path | None,
        typer.Option("--machines", help="File of machines and links (default: the hub's nodes)."),
    ] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    law: Annotated[
        Path | None, typer.Option(help="scaling.json of `atoll scaling fit`: predicts losses.")
    ] = None,
    loss: Annotated[
        float | None, typer.Option(min=0.0, help="Target loss: hours and price until then.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Only this method; repeatable.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Show all candidates, not the best of each method.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE in the job; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Rank methods, intervals, codecs, routes and members for a job, and say why.

    `atoll plan JOB.toml` is the same. Nothing runs; what is not measured is said.

    Examples:
        atoll plan job.toml --machines fleet.toml
        atoll plan job.toml --law law/scaling.json --loss 1.4
    """
    from atoll.cli.planning.job_plan import Question, show

    show(
        Question(
            job=job, machines=machines, hub=hub, law=law, target=loss,
            methods=tuple(method or ()), settings=tuple(settings or ()),
        ),
        all_=all_, as_json=json_,
    )  # fmt: skip


@app.command("fleet")
def fleet(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB.toml]", help="The job that is measured."),
    ] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    probe: Annotated[
        float, typer.Option(min=0.0, max=60.0, help="Seconds of the job on each node; 0: none.")
    ] = 0.0,
    lines: Annotated[
        float,
        typer.Option(min=0.0, max=10.0, help="Seconds of each transfer between nodes; 0: none."),
    ] = 0.0,
    here: Annotated[bool, typer.Option("--here", help="This machine only, without a hub.")] = False,
) -> None:
    """Print the machines that a hub knows, as a file for `atoll plan --machines`.

    With a job and --probe each node computes it alone for so long, one after the other, to measure
    a step of this model. With --lines a small job on all nodes connects each to each, and measures
    rates and round trips; pairs that cannot connect have no link, and use the relay.

    Examples:
        atoll plan fleet > fleet.toml
        atoll plan fleet --lines 0.5 > fleet.toml
        atoll plan fleet job.toml --probe 20 > fleet.toml
        atoll plan fleet job.toml --probe 20 --here >> fleet.toml
    """
    from atoll.cli.planning.fleet_of_hub import print_fleet

    print_fleet(job, hub=hub, probe_s=probe, lines_s=lines, here=here)


@app.command("memory")
def memory(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A job file.")],
    memory_: Annotated[
        str,
        typer.Option("--memory", help="Memory limit per rank, e.g. 16GB (default: from [needs])."),
    ] = "",
    stages: Annotated[
        int, typer.Option("--stages", min=0, help="Cut the model into the stages of a SWARM.")
    ] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE in the job; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Predict the memory of every rank of a member, or every stage; nothing is allocated.

    Exits with status 1 when a rank or a stage needs more than there is, after naming the nearest
    change that makes it fit.

    Examples:
        atoll plan memory job.toml
        atoll plan memory job.toml --memory 16GB --set train.batch=32
        atoll plan memory job.toml --stages 4 --memory 8GB
    """
    import json

    from atoll.cli.jobs.jobfile import Overrides, read_target
    from atoll.cli.views import screen
    from atoll.cli.views.memory_plan import page
    from atoll.config.sizes import parse_size
    from atoll.plan.memory import plan_memory, sizes_of
    from atoll.plan.remedies import nearest_change

    wanted = parse_size(memory_) if memory_ else 0
    spec = read_target(job, Overrides(settings=settings or ())).spec
    if stages:
        preset = None if spec.swarm.stages else "swarm"
        overrides = Overrides(
            preset=preset, stages=stages, nodes=2 * stages, settings=settings or ()
        )
        spec = read_target(job, overrides).spec
    if spec.swarm.stages:
        _stages(spec, limit=wanted, as_json=json_)
        return
    data = sizes_of(spec) if spec.kind == "trainer" else None
    found = plan_memory(spec, data=data)
    limit = wanted or _limit_of(spec, found.device)
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
    from atoll.config.sizes import parse_size
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


def _stages(spec: JobSpec, *, limit: int, as_json: bool) -> None:
    """Show the memory of every stage of a SWARM."""
    import dataclasses
    import json

    from atoll.cli.views import screen
    from atoll.cli.views.stage_plan import page
    from atoll.plan.memory import sizes_of
    from atoll.plan.swarm import fewest_stages, plan_swarm

    data = sizes_of(spec)
    found = plan_swarm(spec, data=data)
    limit = limit or _limit_of(spec, found.device)
    fits = not limit or found.worst_bytes <= limit
    fitting = None if fits else fewest_stages(spec, limit_bytes=limit, data=data)
    if as_json:
        stages = [
            {**dataclasses.asdict(stage), "needs_bytes": found.needs_bytes(stage)}
            for stage in found.stages
        ]
        figures = {
            "model": spec.model.name, "parameters": found.elements, "device": found.device,
            "rows": found.rows, "cuts": list(found.cuts), "balance": found.balance,
            "stages": stages, "whole": found.whole, "worst": found.worst,
            "worst_bytes": found.worst_bytes, "limit_bytes": limit, "fits": fits,
            "fitting_stages": len(fitting.stages) if fitting else None,
        }  # fmt: skip
        typer.echo(json.dumps(figures, indent=1))
    else:
        for drawn in page(found, limit=limit, fitting=fitting):
            screen.output().print(drawn)
    if not fits:
        raise typer.Exit(1)


def _limit_of(spec: JobSpec, device: str) -> int:
    """Return the memory limit that the job itself sets; 0: none."""
    return round(1e9 * (spec.needs.memory_gb if device == "cpu" else spec.needs.gpu_memory_gb))


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
