"""`atoll resume`: take up a job again from its newest complete checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def resume(
    job: Annotated[str, typer.Argument(help="A job of the hub, or a folder runs/JOB.")],
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    detach: Annotated[
        bool, typer.Option("--detach/--follow", help="Resume and return at once.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder where results are collected.")] = Path("runs"),
) -> None:
    """Resume a job that was stopped, failed or interrupted."""
    from atoll.cli import screen
    from atoll.cli.embedded import recall_embedded
    from atoll.cli.precheck import check_names
    from atoll.config import load_spec

    console = screen.output()
    folder = Path(job) if (Path(job) / "job.toml").exists() else runs / job
    local = None if hub else recall_embedded(folder)
    if local is not None:
        from atoll.cli.local_run import LocalRun, run_local

        place, nodes = local
        parameters = check_names(load_spec(folder / "job.toml"))
        plan = LocalRun(
            folder=place, jobs=folder.parent, nodes=nodes, resume=folder.name, parameters=parameters
        )
        raise typer.Exit(run_local(plan, console=console))
    from atoll.cli import known_hub
    from atoll.cli.remote_run import follow_remote

    where = known_hub.find(hub)
    with where.client() as client:
        name = client.resume(Path(job).name)
    raise typer.Exit(follow_remote(where, name, runs=runs, detach=detach, console=console))
