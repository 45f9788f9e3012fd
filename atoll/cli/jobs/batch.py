"""Several jobs at once, followed in one table and independent of each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from atoll.cli.jobs import results
from atoll.cli.jobs.follow import REFRESH_S, await_artifacts, failure, say_ended, show_failure
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.views import screen
from atoll.cli.views.job import Watched, shown_job_state
from atoll.cli.views.live import PLAIN_EVERY_S, plain_line
from atoll.cli.views.tables import jobs_table, remarks
from atoll.errors import DeadlineExceeded, HubUnreachable
from atoll.ids import new_suffix, safe_name
from atoll.net.http.client import HubClient
from atoll.wire.states import JobState


def label(target: Path) -> str:
    """Return a batch label for a file's jobs that are submitted now."""
    return f"{safe_name(target.stem)}-{new_suffix()}"


def follow_batch(
    client: HubClient,
    jobs: Sequence[str],
    *,
    console: Console,
    interrupts: Interrupts,
    check: Callable[[], None] = lambda: None,
    away_s: float = 3600.0,
    on_end: Callable[[Watched], None] = lambda _: None,
) -> list[Watched]:
    """Show jobs until all have ended or a signal came; return their last known states.

    Args:
        client: The hub.
        jobs: Their ids.
        console: Where they are shown.
        interrupts: Ends the wait.
        check: Called at every refresh; raises to give up.
        away_s: How long the hub may be unreachable.
        on_end: Called with each job as soon as it has ended and its artifacts are there; again
            later if it raises HubUnreachable or DeadlineExceeded.

    Raises:
        HubUnreachable: the hub was unreachable for longer than that.
    """
    watched, reported = [Watched(job) for job in jobs], set[str]()
    reached = time.monotonic()
    with _BatchView(console) as view:
        while True:
            check()
            try:
                for one in watched:
                    if not one.ended:
                        one.refresh(client)
                view.show(watched)
                for one in watched:
                    if one.ended and one.job not in reported:
                        await_artifacts(client, one, interrupts)
                        on_end(one)
                        reported.add(one.job)
                reached = time.monotonic()
            except (HubUnreachable, DeadlineExceeded):
                if time.monotonic() - reached > away_s:
                    raise
                view.show([one for one in watched if one.view])
            if all(one.job in reported for one in watched) or interrupts.sleep(REFRESH_S):
                break
    return watched


def say_how_they_ended(client: HubClient, watched: Sequence[Watched], *, console: Console) -> None:
    """Print a line per job; for failed ones the exit status, the last lines and the remedy."""
    for one in watched:
        if one.state != JobState.FAILED:
            say_ended(console, one.view)
        else:
            show_failure(screen.errors(), client, one.view)
            screen.show_error(failure(one.view))


def finish_batch(watched: Sequence[Watched], *, folder: Path, console: Console) -> int:
    """Print where each job's results are; return the exit status of the command.

    Args:
        watched: The jobs as they ended.
        folder: `runs/`, where each has a folder of its own.
        console: Where it is printed.
    """
    for one in watched:
        if one.state == JobState.DONE:
            console.print(f"[bold]{escape(one.job)}[/]", soft_wrap=True)
            results.finish(folder / one.job, view=one.view, console=console)
    return 1 if any(one.state == JobState.FAILED for one in watched) else 0


class _BatchView:
    """A table that is redrawn; without a terminal, a line per job when it changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._states: dict[str, str] = {}
        self._last_plain = time.monotonic()

    def __enter__(self) -> _BatchView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, watched: Sequence[Watched]) -> None:
        """Draw the current state of the jobs."""
        if self._live is not None:
            views = [one.view for one in watched]
            self._live.update(Group(jobs_table(views), remarks(views)), refresh=True)
            return
        due = time.monotonic() - self._last_plain >= PLAIN_EVERY_S
        if due:
            self._last_plain = time.monotonic()
        for one in watched:
            state = shown_job_state(one.view)
            if self._states.get(one.job) != state or (due and not one.ended):
                self._states[one.job] = state
                self._console.print(plain_line(one), soft_wrap=True)
