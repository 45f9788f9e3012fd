"""A job on the nodes of a hub: submitted, followed, its results fetched."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from atoll.cli import collect, screen
from atoll.cli.follow import failure, follow, say_ended, show_failure
from atoll.cli.interrupts import Interrupts
from atoll.cli.jobfile import Submission
from atoll.cli.known_hub import KnownHub
from atoll.cli.live import View


def run_remote(
    where: KnownHub,
    submission: Submission,
    *,
    runs: Path,
    detach: bool,
    console: Console,
    parameters: int = 0,
) -> int:
    """Submit a job and follow it; return the exit status of the command."""
    with where.client() as client:
        job = client.submit(submission.text, files=submission.files)
    echo = bool(submission.spec.job.script)
    return follow_remote(
        where,
        job,
        runs=runs,
        detach=detach,
        console=console,
        echo=echo,
        parameters=parameters,
    )


def follow_remote(
    where: KnownHub,
    job: str,
    *,
    runs: Path,
    detach: bool,
    console: Console,
    echo: bool = False,
    parameters: int = 0,
) -> int:
    """Follow a job to its end and fetch its results; Ctrl+C lets it go on without us."""
    if detach:
        console.print(f"submitted [bold]{escape(job)}[/]", soft_wrap=True)
        _say_commands(console, job)
        return 0
    note = "Ctrl+C leaves it running"
    with where.client() as client:
        with (
            Interrupts() as interrupts,
            View(console, dashboard=where.url, note=note) as view,
        ):
            watched = follow(
                client, job, view=view, interrupts=interrupts, echo=echo, parameters=parameters
            )
        if not watched.ended:
            console.print(f"{escape(job)} goes on without this window", soft_wrap=True)
            _say_commands(console, job)
            return 130
        if watched.state == "failed":
            show_failure(screen.errors(), client, watched.view)
            raise failure(watched.view)
        say_ended(console, watched.view)
        if watched.state == "stopped":
            console.print(f"take it up again: atoll resume {escape(job)}", soft_wrap=True)
            return 0
        folder = runs / job
        collect.fetch(client, job, folder)
    collect.finish(folder, view=watched.view, console=console)
    return 0


def _say_commands(console: Console, job: str) -> None:
    console.print(f"  watch it    atoll status {job}   |   atoll logs -f {job}", soft_wrap=True)
    console.print(f"  stop it     atoll stop {job}", soft_wrap=True)
