"""`atoll run`: run job files or a Python script on a hub's nodes or on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.cli.jobs.jobfile import Submission


def run(
    target: Annotated[Path, typer.Argument(help="A job file (.toml), a script (.py), or demo.")],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further job files of the same batch; else arguments of the script, after --."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-n", min=1, help="Number of members.")
    ] = None,
    on: Annotated[
        list[str] | None, typer.Option("--on", help="Node that may run it (repeatable).")
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Run one copy on every node that is online and fits.")
    ] = False,
    priority: Annotated[
        int | None, typer.Option(help="Waiting jobs with a higher priority start first.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Method in place of the file's, with its own defaults.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages of a SWARM: each member serves one of them.")
    ] = None,
    outer: Annotated[str | None, typer.Option(help="Outer strategy, e.g. diloco.")] = None,
    codec: Annotated[str | None, typer.Option(help="Wire codec, e.g. int8.")] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps between two rounds.")
    ] = None,
    inner: Annotated[
        str | None,
        typer.Option(help="Inner strategy: local, ddp, fsdp, tensor, pipeline, hybrid, swarm."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes of each member, e.g. one per accelerator.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Ranks per axis of a member, e.g. replicate=2,tensor=2.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of computation: auto, fp32, bf16 or fp16.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="What computes: auto, cpu, cuda, cuda:1, xpu or mps.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE, e.g. train.lr=1e-3.")
    ] = None,
    local: Annotated[
        int | None, typer.Option(min=1, help="Run on this machine only, with this number of nodes.")
    ] = None,
    plan_: Annotated[
        str, typer.Option("--plan", help="auto: take the first choice of `atoll plan`.")
    ] = "",
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    detach: Annotated[
        bool, typer.Option("--detach/--follow", help="Submit and return at once.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder where results are collected.")] = Path("runs"),
    picture: Annotated[
        Path | None,
        typer.Option(help="With --local: also save the terminal output as an animated SVG."),
    ] = None,
) -> None:
    """Run jobs: submit them, watch them, and collect their results in runs/JOB/.

    State is saved at intervals: about eight times in a run of the built-in trainer, every five
    minutes in a script that uses run.wrap (--set checkpoint.every_s=SECONDS; 0: never).
    `atoll resume`, and members that were all killed, continue from the last checkpoint.
    """
    import dataclasses

    from atoll.cli.jobs.jobfile import Overrides, anywhere, read_targets, sort_words
    from atoll.cli.jobs.precheck import check_names
    from atoll.cli.jobs.stage_needs import with_stage_needs
    from atoll.cli.views import screen

    files, arguments = sort_words(target, more or ())
    overrides = Overrides(
        nodes=nodes,
        preset=preset,
        stages=stages,
        outer=outer,
        codec=codec,
        every=every,
        inner=inner,
        ranks=ranks,
        mesh=mesh,
        precision=precision,
        device=device,
        on=on or (),
        priority=priority,
        settings=set_ or (),
        arguments=arguments,
    )
    submissions = read_targets(files, overrides)
    if local is not None and nodes is None and len(submissions) == 1:
        submissions = read_targets(files, dataclasses.replace(overrides, nodes=local))
    here = local is not None
    submissions = _planned(submissions, plan=plan_, here=here, hub=hub)
    parameters = [check_names(submission.spec, here=here) for submission in submissions]
    submissions = [with_stage_needs(submission) for submission in submissions]
    console = screen.output()
    if local is not None:
        from atoll.cli.jobs.local import LocalRun, new_folder, run_local
        from atoll.cli.picture import Picture

        typed = f"atoll run {target} --local {local}"
        plan = LocalRun(
            folder=new_folder(runs),
            jobs=runs,
            nodes=local * max(submission.spec.island.machines for submission in submissions),
            submissions=anywhere(submissions, each=each),
            parameters=parameters[0],
            picture=Picture(picture, command=typed) if picture else None,
        )
        raise typer.Exit(run_local(plan, console=console))
    from atoll.cli import hub_access
    from atoll.cli.jobs.remote import RemoteRun, run_remote

    remote = RemoteRun(
        submissions=submissions, each=each, runs=runs, detach=detach, parameters=parameters[0]
    )
    raise typer.Exit(
        run_remote(
            hub_access.find(hub, without=hub_access.ALONE), remote, target=target, console=console
        )
    )


def _planned(
    submissions: Sequence[Submission], *, plan: str, here: bool, hub: str
) -> list[Submission]:
    """Return the jobs with what they leave to the planner; others as they are."""
    from atoll.forecast.keys import is_open

    if not any(is_open(submission.spec, plan=plan) for submission in submissions):
        return list(submissions)
    from atoll.cli import hub_access
    from atoll.cli.planning.choose import choose
    from atoll.cli.views import screen

    place, console = (
        None if here else hub_access.find(hub, without=hub_access.ALONE),
        screen.output(),
    )
    return [
        choose(submission, plan=plan, hub=place, console=console)
        if is_open(submission.spec, plan=plan)
        else submission
        for submission in submissions
    ]
