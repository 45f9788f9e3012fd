"""`atoll logs`: the output of a job's processes; `atoll collect`: its results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.cli.jobs.local import LocalOutput
    from atoll.net.http.client import HubClient

LOCAL_POLL_S = 0.2
"""Interval between two looks at the files of an embedded run."""


def logs(
    job: Annotated[
        str, typer.Argument(help="A job (default: the newest), or the folder of a local run.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")
    ] = False,
    member: Annotated[str, typer.Option(help="One member only, e.g. w2.")] = "",
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of last lines; 0: all.")
    ] = 200,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Print the lines of a job's processes, each with its member."""
    from atoll.cli import hub_access
    from atoll.cli.jobs.embedded import recall_embedded
    from atoll.cli.jobs.local import LocalOutput
    from atoll.cli.views import screen

    console = screen.output()
    local = recall_embedded(Path(job)) if job and not hub else None
    if local is not None:  # its hub may be gone; what its processes printed is still here
        output = LocalOutput(local[0], job_folder=Path(job).resolve(), member=member)
        _show_local(console, output, follow=follow, lines=lines)
        return
    with hub_access.find(hub).client(timeout_s=60.0) as client:
        chosen = job or hub_access.newest_job(client)
        _show(console, client, chosen, member=member, follow=follow, lines=lines)


def _show_local(console: Console, output: LocalOutput, *, follow: bool, lines: int) -> None:
    """Print the output of an embedded run, following it until it ends."""
    import time

    from atoll.cli.views import screen

    shown = output.lines(last=not follow)
    for line in shown[-lines:] if lines else shown:
        screen.log_line(console, line)
    while follow:
        ended = output.ended()
        for line in output.lines(last=ended):
            screen.log_line(console, line)
        if ended:
            return
        time.sleep(LOCAL_POLL_S)


def _show(
    console: Console, client: HubClient, job: str, *, member: str, follow: bool, lines: int
) -> None:
    """Print the output of a hub's job, following it until it ends."""
    from atoll.cli.views import screen
    from atoll.cli.views.job import ENDED

    after, shown = 0, []
    while True:
        answer = client.logs(job, after=after, member=member)
        after = int(answer["last"])
        shown += answer["lines"]
        if not answer["lines"]:
            break
    for line in shown[-lines:] if lines else shown:
        screen.log_line(console, line)
    while follow:
        ended = client.job(job)["state"] in ENDED
        answer = client.logs(job, after=after, member=member, wait_s=0.0 if ended else 10.0)
        after = int(answer["last"])
        for line in answer["lines"]:
            screen.log_line(console, line)
        if ended and not answer["lines"]:
            return


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
