"""`atoll collect`: fetch the results of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def collect(
    job: Annotated[str, typer.Argument(help="A job (default: the newest).")] = "",
    to: Annotated[Path | None, typer.Option(help="Folder (default: runs/JOB).")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All files of the job, checkpoints too.")
    ] = False,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Fetch the results of a job: its artifacts, its records, its model."""
    from rich.markup import escape

    from atoll.cli import hub_access
    from atoll.cli.jobs.results import fetch
    from atoll.cli.views import screen

    console = screen.output()
    with hub_access.find(hub).client() as client:
        chosen = job or hub_access.newest_job(client)
        folder = to or Path("runs") / chosen
        names = fetch(client, client.job(chosen)["job"], folder, everything=everything)
    for name in names:
        console.print(f"  {escape(name)}", soft_wrap=True, style="dim")
    console.print(f"{len(names)} files in {escape(screen.shown(folder))}", soft_wrap=True)
