"""`atoll rm`: delete ended jobs with all their data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.errors import ConfigError, JobError
from atoll.wire.states import JobState

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.net.http.client import HubClient

FIRST = ("job", "state")
ENDED = frozenset(state for state in JobState if state.ended)


def remove(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Ended jobs, or prefixes of their names.")
    ] = None,
    batch: Annotated[str, typer.Option(help="All jobs of this batch.")] = "",
    ended_before: Annotated[
        str, typer.Option(help="Only jobs that ended at least this long ago, e.g. 30d.")
    ] = "",
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Keep their folders at the hub.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Delete jobs that have ended: record, output, checkpoints, artifacts, queues, files."""
    from atoll.cli import hub_access
    from atoll.cli.access.ticket import duration_s
    from atoll.cli.jobs.names import jobs_named
    from atoll.cli.views import screen

    before = time.time() - duration_s(ended_before) if ended_before else None
    if not jobs and not batch and before is None:
        raise ConfigError(
            "no jobs to delete are given",
            expected="atoll rm JOB..., --batch NAME or --ended-before 30d",
        )
    console = screen.output()
    with hub_access.find(hub).client() as client:
        everything = client.jobs()
        names = jobs_named(jobs or (), [str(view["job"]) for view in everything])
        views = chosen(everything, names=names, batch=batch, before=before)
        if not views:
            console.print("no such job has ended")
            return
        sizes = [client.job_size(str(view["job"])) for view in views]
        _show(console, views, sizes, keep_files=keep_files)
        _make_sure(console, len(views), yes=yes)
        _delete(console, client, views, keep_files=keep_files)


def chosen(
    views: Iterable[dict[str, Any]], *, names: Sequence[str], batch: str, before: float | None
) -> list[dict[str, Any]]:
    """Return the selected jobs, oldest first.

    Args:
        views: All jobs of the hub.
        names: Jobs that were named, in full.
        batch: Label of further jobs; empty: none.
        before: Latest wall time of their end; without names and batch it selects among all jobs.

    Raises:
        JobError: one of them has not ended.
    """
    by_name = {str(view["job"]): view for view in views}
    everything = not names and not batch
    found = [
        view for name, view in by_name.items()
        if everything or name in names or (batch and view.get("batch") == batch)
    ]  # fmt: skip
    if before is not None:
        found = [v for v in found if v["state"] in ENDED and (v.get("ended") or 0) <= before]
    at_work = [str(view["job"]) for view in found if view["state"] not in ENDED]
    if at_work:
        raise JobError(
            "only jobs that have ended can be deleted; nothing was deleted",
            given=", ".join(at_work),
            expected="jobs that are done, failed or stopped",
            remedy=f"end it first: atoll stop {at_work[0]}",
        )
    return found[::-1]


def bytes_of(size: dict[str, Any], *, keep_files: bool) -> int:
    """Return the bytes that deleting a job frees, from the hub's sizes."""
    return int(size["code_bytes"] + size["queue_bytes"] + (0 if keep_files else size["file_bytes"]))


def _show(
    console: Console,
    views: Sequence[dict[str, Any]],
    sizes: Sequence[dict[str, Any]],
    *,
    keep_files: bool,
) -> None:
    """Print what is deleted, job by job, and the total."""
    from rich.table import Table

    from atoll.cli.views import screen

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("job", "state", "files", "bytes"):
        table.add_column(name, no_wrap=True, justify="left" if name in FIRST else "right")
    for view, size in zip(views, sizes, strict=True):
        table.add_row(
            str(view["job"]), str(view["state"]),
            "stay" if keep_files else str(size["files"]),
            screen.size(bytes_of(size, keep_files=keep_files)),
        )  # fmt: skip
    console.print(table)
    total = sum(bytes_of(size, keep_files=keep_files) for size in sizes)
    what = ["1 job" if len(views) == 1 else f"{len(views)} jobs", screen.size(total)]
    saved = 0 if keep_files else sum(int(size["checkpoint_bytes"]) for size in sizes)
    what += [f"of it {screen.size(saved)} checkpoints"] if saved else []
    items = sum(int(size["queue_items"]) for size in sizes)
    what += [f"{items} queued item{'s' if items > 1 else ''}"] if items else []
    console.print(f"{', '.join(what)}: this cannot be undone", soft_wrap=True)


def _make_sure(console: Console, count: int, *, yes: bool) -> None:
    """Ask for confirmation."""
    import sys

    if yes:
        return
    if not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigError("not a terminal; pass --yes to delete", remedy="atoll rm ... --yes")
    question = "Delete it?" if count == 1 else f"Delete all {count}?"
    typer.confirm(question, default=False, abort=True)


def _delete(
    console: Console, client: HubClient, views: Sequence[dict[str, Any]], *, keep_files: bool
) -> None:
    from atoll.cli.views import screen

    for view in views:
        job = str(view["job"])
        gone = client.delete_job(job, keep_files=keep_files)
        size = screen.size(bytes_of(gone, keep_files=keep_files))
        rest = "" if gone["finished"] else "; the hub is still removing what is left of it"
        console.print(f"deleted {job} ({size}){rest}", soft_wrap=True, markup=False)
