"""`atoll run`: a job file or a Python script, on the nodes of a hub or on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    target: Annotated[Path, typer.Argument(help="A job file (.toml) or a script (.py).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-n", min=1, help="How many members train together.")
    ] = None,
    outer: Annotated[str | None, typer.Option(help="Outer strategy, e.g. diloco.")] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the wire, e.g. int8.")] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Inner steps between two agreements.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE, e.g. train.lr=1e-3.")
    ] = None,
    local: Annotated[
        int | None, typer.Option(min=1, help="Run on this machine alone, with so many nodes.")
    ] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    detach: Annotated[
        bool, typer.Option("--detach/--follow", help="Submit and return at once.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder where results are collected.")] = Path("runs"),
) -> None:
    """Train: submit a job, watch it, and collect its results in runs/JOB/."""
    from atoll.cli import screen
    from atoll.cli.jobfile import Overrides, read_target
    from atoll.cli.precheck import check_names

    overrides = Overrides(
        nodes=nodes if nodes is not None else local,
        outer=outer,
        codec=codec,
        every=every,
        settings=set_ or (),
        arguments=arguments or (),
    )
    submission = read_target(target, overrides)
    parameters = check_names(submission.spec)
    console = screen.output()
    if local is not None:
        from atoll.cli.local_run import LocalRun, new_folder, run_local

        plan = LocalRun(
            folder=new_folder(runs),
            jobs=runs,
            nodes=local,
            submission=submission,
            parameters=parameters,
        )
        raise typer.Exit(run_local(plan, console=console))
    from atoll.cli import known_hub
    from atoll.cli.remote_run import run_remote

    where = known_hub.find(hub)
    raise typer.Exit(
        run_remote(
            where, submission, runs=runs, detach=detach, parameters=parameters, console=console
        )
    )
