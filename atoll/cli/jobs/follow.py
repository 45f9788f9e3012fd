"""Follow a job to its end, or to Ctrl+C, and show why it failed if it did."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.views import screen
from atoll.cli.views.job import Watched
from atoll.cli.views.live import View
from atoll.cli.views.log_lines import Chatter
from atoll.errors import AtollError, DeadlineExceeded, HubUnreachable, JobError, from_dict
from atoll.ids import machine_names
from atoll.net.http.client import HubClient
from atoll.wire.states import MemberState

REFRESH_S = 0.5

NEWS_S = 0.4
"""Part of that time in which news of the hub end the wait; Ctrl+C is noticed that much later."""

ARTIFACTS_S = 130.0
"""Slightly longer than a node takes to send one process's artifacts."""

LAST_LINES_S = 3.0
"""How long the members' last output lines may take to the hub."""

WAITED = 1.1
"""From this ratio on of wall clock to training time, both are shown."""

TAIL_LINES = 40
"""Last lines of a failed member that are shown."""


def follow(
    client: HubClient,
    watched: Watched,
    *,
    view: View,
    interrupts: Interrupts,
    check: Callable[[], None] = lambda: None,
    away_s: float = 3600.0,
    echo: bool = False,
) -> Watched:
    """Show a job until it has ended or a signal came; return its last known state.

    Args:
        client: The hub.
        watched: The job.
        view: Where it is shown.
        interrupts: Ends the wait.
        check: Called at every refresh; raises to give up.
        away_s: How long the hub may be unreachable.
        echo: Print the members' output, e.g. of a user's script.

    Raises:
        HubUnreachable: the hub was unreachable for longer than that.
    """
    echo_after, chatter = 0, Chatter()
    reached = time.monotonic()
    while True:
        check()
        try:
            watched.refresh(client)
            reached = time.monotonic()
        except (HubUnreachable, DeadlineExceeded):
            if time.monotonic() - reached > away_s:
                raise
        if watched.view:
            view.show(watched, last=watched.ended)
            if watched.ended:
                await_artifacts(client, watched, interrupts)
            if echo and watched.ended:
                _await_last_lines(client, watched, interrupts)
            if echo:
                echo_after = _echo(client, watched, view, after=echo_after, chatter=chatter)
        if watched.ended or _pause(client, watched, interrupts):
            return watched


def await_artifacts(client: HubClient, watched: Watched, interrupts: Interrupts) -> None:
    """Wait until the failed processes' artifacts are at the hub, which arrive after their ends."""
    deadline = time.monotonic() + ARTIFACTS_S
    with contextlib.suppress(HubUnreachable, DeadlineExceeded):
        while any(member.get("collecting") for member in watched.members):
            if time.monotonic() >= deadline or interrupts.sleep(0.2):
                return
            watched.view = client.job(watched.job)


def _await_last_lines(client: HubClient, watched: Watched, interrupts: Interrupts) -> None:
    """Wait until the processes of finished members have ended, when all their output has arrived.

    A member reports that it is done before its process ends.
    """
    deadline = time.monotonic() + LAST_LINES_S
    with contextlib.suppress(HubUnreachable, DeadlineExceeded):
        while any(
            m["state"] == MemberState.DONE and m.get("exit_code") is None for m in watched.members
        ):
            if time.monotonic() >= deadline or interrupts.sleep(0.05):
                return
            watched.view = client.job(watched.job)


def _pause(client: HubClient, watched: Watched, interrupts: Interrupts) -> bool:
    """Wait for the next refresh or for news; return whether a signal came."""
    if interrupts.sleep(REFRESH_S - NEWS_S):
        return True
    try:
        watched.await_news(client, timeout_s=NEWS_S)
    except (HubUnreachable, DeadlineExceeded):
        return interrupts.sleep(NEWS_S)
    return bool(interrupts)


def _echo(client: HubClient, watched: Watched, view: View, *, after: int, chatter: Chatter) -> int:
    """Print the members' new lines above the view; return the number of the last one.

    An answer of the hub has a limited number of lines; after the job's end there is no later call
    for the rest.
    """
    names = machine_names(watched.nodes)
    while True:
        try:
            answer = client.logs(watched.job, after=after)
        except (HubUnreachable, DeadlineExceeded):
            return after
        for line in chatter.without(answer["lines"]):
            view.line(line, name=names.get(line["member"], line["member"]))
        after = int(answer["last"])
        if not (watched.ended and answer["lines"]):
            return after


def failure(view: dict[str, Any]) -> AtollError:
    """Return the error with which a job failed."""
    if view.get("error"):
        error = dict(view["error"])
        if error.get("given") in {member["member"] for member in view.get("members", [])}:
            error.pop("given")  # its machine was named before
        return from_dict(error)
    return JobError(
        f"the job {view['job']} failed", given=view.get("reason") or None, remedy="atoll logs"
    )


def show_failure(
    console: Console, client: HubClient, view: dict[str, Any], *, echoed: bool = False
) -> None:
    """Print where a job failed and the last lines there; `echoed`: its output was printed."""
    failed = [m for m in view.get("members", []) if m.get("error")]
    if not failed:
        return
    worst = next((m for m in failed if m["member"] == view.get("failed_member")), failed[0])
    member, node = worst["member"], worst["node"]
    code = worst.get("exit_code")
    ended = f" (exit status {code})" if code is not None else ""
    lines = [] if echoed else _last_lines(client, view["job"], member)
    title = f"{escape(view['job'])} failed{_spent(view)} on [bold]{escape(node)}[/]{ended}"
    console.print(title + (", its last lines:" if lines else ""), soft_wrap=True)
    for line in lines:
        console.print(f"  {escape(line['text'])}", soft_wrap=True, style="dim")


def _last_lines(client: HubClient, job: str, member: str) -> list[dict[str, Any]]:
    try:
        return list(client.logs(job, member=member, tail=TAIL_LINES)["lines"])
    except AtollError:
        return []


def say_ended(console: Console, view: dict[str, Any]) -> None:
    """Print one line about how a job ended."""
    how, reason = str(view["state"]), str(view.get("reason") or "")
    if reason:
        how = reason if reason.startswith(how) else f"{how} ({reason})"
    console.print(f"{escape(view['job'])} {escape(how)}{_spent(view)}", soft_wrap=True)


def _spent(view: dict[str, Any]) -> str:
    """Return how long a job trained, and the wall clock where it differs."""
    progress = view.get("progress") or {}
    trained, wall = progress.get("training_s"), progress.get("wall_s")
    if not trained:
        return ""
    said = f" after {screen.duration(trained)}"
    differs = wall is not None and wall > trained * WAITED
    return f"{said} of training, {screen.duration(wall)} by the clock" if differs else said
