"""Run jobs on the nodes of a hub: submit, follow, fetch results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from atoll.cli.hub_access import KnownHub
from atoll.cli.jobs import batch, results
from atoll.cli.jobs.follow import failure, follow, say_ended, show_failure
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.stage_needs import check_offered
from atoll.cli.jobs.submit import check_nodes, one_per_node, send_batch
from atoll.cli.views import screen
from atoll.cli.views.job import Watched
from atoll.cli.views.live import SILENT, View
from atoll.net.http.client import HubClient
from atoll.wire.states import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRun:
    """What to run on the nodes of a hub."""

    submissions: Sequence[Submission]
    each: bool = False
    """Run a copy of each on every node that fits."""
    runs: Path
    detach: bool = False
    parameters: int = 0
    """Of the model of a single job, if known."""


def run_remote(where: KnownHub, request: RemoteRun, *, target: Path, console: Console) -> int:
    """Submit jobs and follow them; return the exit status of the command.

    Args:
        where: The hub.
        request: What to run.
        target: The file that gives a batch its label.
        console: Where it is shown.
    """
    submissions = list(request.submissions)
    with where.client() as client:
        check_nodes(submissions, client.nodes())
        for submission in submissions:
            if submission.spec.swarm.needs_gb:
                check_offered(submission.spec, client.nodes())
        if request.each:
            submissions, skipped = one_per_node(submissions, client.nodes())
            for line in skipped:
                console.print(f"[dim]left out: {escape(line)}[/]", soft_wrap=True)
        with _saying_what_goes_on(console):
            jobs = send_batch(client, submissions, batch=batch.label(target))
    with _saying_what_goes_on(console):
        if len(jobs) == 1:
            return follow_remote(
                where,
                jobs[0],
                runs=request.runs,
                detach=request.detach,
                console=console,
                echo=submissions[0].spec.kind not in SILENT,
                parameters=request.parameters,
            )
        return _follow_several(where, jobs, request=request, console=console)


@contextlib.contextmanager
def _saying_what_goes_on(console: Console) -> Iterator[None]:
    """After Ctrl+C say that the hub may have jobs, even those it has not yet confirmed."""
    try:
        yield
    except KeyboardInterrupt:
        text = "interrupted; what the hub has continues in the background"
        console.print(f"{text}: atoll status, atoll stop JOB", soft_wrap=True)
        raise


def _follow_several(
    where: KnownHub, jobs: Sequence[str], *, request: RemoteRun, console: Console
) -> int:
    """Follow the jobs of a batch to their ends and fetch their results."""
    console.print(f"submitted {len(jobs)} jobs: [bold]{escape(', '.join(jobs))}[/]", soft_wrap=True)
    if request.detach:
        console.print("  watch them  atoll status, atoll watch JOB", soft_wrap=True)
        return 0
    with where.client() as client:
        with Interrupts() as interrupts:
            watched = batch.follow_batch(client, jobs, console=console, interrupts=interrupts)
        if not all(one.ended for one in watched):
            console.print("they continue in the background: atoll status", soft_wrap=True)
            return 130
        batch.say_how_they_ended(client, watched, console=console)
        for one in watched:
            if one.state != JobState.STOPPED:
                results.fetch(client, one.job, request.runs / one.job)
    return batch.finish_batch(watched, folder=request.runs, console=console)


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
    """Follow a job to its end and fetch its results; after Ctrl+C the job continues."""
    if detach:
        console.print(f"submitted [bold]{escape(job)}[/]", soft_wrap=True)
        _say_commands(console, job)
        return 0
    with where.client() as client:
        watched = Watched(job, parameters=parameters)
        if not _follow_live(where, client, watched, console=console, echo=echo):
            return 130
        if watched.state == JobState.FAILED:
            results.fetch(client, job, runs / job)
            show_failure(screen.errors(), client, watched.view, echoed=echo)
            if results.came_to_something(watched.view):
                results.finish(runs / job, view=watched.view, console=console)
            raise failure(watched.view)
        say_ended(console, watched.view)
        if watched.state == JobState.STOPPED:
            console.print(f"resume it: atoll resume {escape(job)}", soft_wrap=True)
            return 0
        folder = runs / job
        results.fetch(client, job, folder)
    results.finish(folder, view=watched.view, console=console)
    return 0


def watch_remote(where: KnownHub, job: str, *, console: Console) -> int:
    """Show a job until it ends, and say how it ended; its results stay at the hub."""
    with where.client() as client:
        watched = Watched.of(client.job(job))
        echo = watched.view.get("kind") not in SILENT
        if not _follow_live(where, client, watched, console=console, echo=echo):
            return 130
        if watched.state == JobState.FAILED:
            show_failure(screen.errors(), client, watched.view, echoed=echo)
            raise failure(watched.view)
        say_ended(console, watched.view)
    again = "resume" if watched.state == JobState.STOPPED else "collect"
    words = {"resume": "resume it", "collect": "its results"}
    console.print(f"{words[again]}: atoll {again} {escape(job)}", soft_wrap=True)
    return 0


def _follow_live(
    where: KnownHub, client: HubClient, watched: Watched, *, console: Console, echo: bool
) -> bool:
    """Show a job live; return whether it has ended, and if not, say that it goes on."""
    note = "Ctrl+C leaves it running"
    with (
        Interrupts() as interrupts,
        View(console, dashboard=where.url, note=note) as view,
    ):
        follow(client, watched, view=view, interrupts=interrupts, echo=echo)
    if not watched.ended:
        console.print(f"{escape(watched.job)} continues in the background", soft_wrap=True)
        _say_commands(console, watched.job)
    return watched.ended


def _say_commands(console: Console, job: str) -> None:
    console.print(f"  watch it    atoll watch {job}", soft_wrap=True)
    console.print(f"  stop it     atoll stop {job}", soft_wrap=True)
