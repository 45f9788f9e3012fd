"""The live terminal view of a running job; plain lines without a terminal."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from atoll.cli.picture import Picture
from atoll.cli.views import screen
from atoll.cli.views.job import Watched, shown_job_state, why_not_yet
from atoll.cli.views.members import members_table
from atoll.cli.views.paths import paths_part
from atoll.cli.views.progress import bar, figures
from atoll.cli.views.rl import rl_line, rl_parts
from atoll.cli.views.swarm import stages_part
from atoll.ids import spoken
from atoll.wire.states import JobState, MemberState

PLAIN_EVERY_S = 5.0
"""Interval between plain lines: informative, but not too much for a CI log."""

QUIET_EVENTS = frozenset(
    {"submitted", "waiting", "assigned", "started", "running", "checkpoint"}
    | {"member-done", "done", "failed", "stopped"}
)
"""Events that the view shows anyway, or that the command reports at its end."""

SILENT = ("trainer", "rl")
"""Kinds of jobs without the members' output above the view, which has the same figures."""


class View:
    """Shows a running job; use as a context manager and call `show` after every refresh."""

    def __init__(
        self,
        console: Console,
        *,
        dashboard: str,
        note: str = "",
        picture: Picture | None = None,
    ) -> None:
        """`note` is a line under the view, e.g. what Ctrl+C will do; `picture` keeps the frames."""
        self._kept = picture
        self._console = console
        self.dashboard = dashboard
        self._note = note
        self._live: Live | None = None
        self._drawn = False
        self._last_plain = -math.inf
        self._loss_shown = False
        self._late: list[dict[str, Any]] = []
        """Failures of members, until the next refresh."""

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last frame on the screen; later output goes below it."""
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Show a message before there is a job, or beside it."""
        if self._live is not None and not self._drawn:
            self._live.update(Text(text, style="dim"))
        else:
            self._console.print(escape(text), soft_wrap=True)

    def line(self, line: dict[str, Any], *, name: str) -> None:
        """Print one output line of a member above the view, with the member's name for people."""
        screen.log_line(self._console, line, name=name)

    def show(self, job: Watched, *, last: bool = False) -> None:
        """Draw the job's current state; `last` also prints a plain line that is not due."""
        for event in self._news(job, last=last):
            said = spoken(event["text"], job.nodes, member=str(event.get("member") or ""))
            self._console.print(f"[dim]{escape(said)}[/]", soft_wrap=True)
        if self._kept is not None:
            frame = self._picture(job, dashboard=self.dashboard.partition("?")[0])  # no token in it
            self._kept.offer(frame)
        if self._live is not None:
            self._drawn = True
            self._live.update(self._picture(job, dashboard=self.dashboard), refresh=True)
        elif job.state != JobState.FAILED and (last or self._is_due(job)):
            self._last_plain = time.monotonic()
            self._console.print(plain_line(job), soft_wrap=True)

    def _news(self, job: Watched, *, last: bool) -> list[dict[str, Any]]:
        """Return the events to show: not those with the cause of a failure, shown once at its end.

        A failed member is shown one refresh late: by then it is known whether its job failed, too.
        """
        failed = job.state == JobState.FAILED
        news = [event for event in job.events if event["kind"] not in QUIET_EVENTS]
        late = [event for event in news if event["kind"] == "member-failed"]
        known = [] if failed else self._late + (late if last else [])
        self._late = late
        return known + [
            event
            for event in news
            if event["kind"] != "member-failed"
            and not (failed and event["kind"] == "alarm" and job.job in event["text"])
        ]

    def _is_due(self, job: Watched) -> bool:
        """Return whether to print a plain line: after every interval, and for the first loss."""
        first = job.loss is not None and not self._loss_shown
        self._loss_shown = self._loss_shown or first
        return first or time.monotonic() - self._last_plain >= PLAIN_EVERY_S

    def _picture(self, job: Watched, *, dashboard: str) -> RenderableType:
        swarm, paths = job.view.get("swarm"), job.view.get("paths")
        parts: list[RenderableType] = [
            stages_part(swarm) if swarm is not None else members_table(job.processes)
        ]
        if paths is not None:
            parts.append(paths_part(paths))
        kind, state = job.view.get("kind"), shown_job_state(job.view)
        if kind == "rl":
            parts = rl_parts(job)
        elif state == JobState.WAITING:
            parts = []  # nothing has begun
        elif kind != "command":  # which reports no steps
            parts = [bar(job), figures(job), *parts]
        if (reason := why_not_yet(job.view)) and state != JobState.FAILED:  # it is shown at the end
            parts.insert(0, Text(reason, style="yellow"))
        footer = Text(f"dashboard  {dashboard}", style="dim", overflow="fold")
        if self._note and not job.ended:
            footer.append(f"\n{self._note}")
        spent = f"  {screen.duration(job.training_s)}" if job.training_s else ""
        title = f"[bold]{escape(job.job)}[/]  {escape(state)}{spent}"
        return Panel(Group(*parts, footer), title=title, title_align="left", border_style="cyan")


def plain_line(job: Watched) -> str:
    """Return the state of a job as one line."""
    parts = [f"{job.job} {shown_job_state(job.view)}"]
    if not job.ended and (reason := why_not_yet(job.view)):
        parts.append(reason)
    if job.view.get("kind") == "rl":
        return escape(" | ".join([*parts, *rl_line(job)]))
    swarm = job.view.get("swarm")
    if swarm is not None and swarm["paused"]:
        parts.append(swarm["paused"])
    if job.steps:
        parts.append(f"step {job.step}/{job.steps}")
    elif job.step:
        parts.append(f"step {job.step}")
    if job.state == JobState.RUNNING and job.steps:
        parts.append(f"ETA {screen.duration(job.left_s)}")
    if job.loss is not None:
        parts.append(f"loss {job.loss:.3f}")
    if job.held_out is not None:
        parts.append(f"held-out {job.held_out:.3f}")
    if job.tokens_per_s:
        parts.append(f"{screen.count(job.tokens_per_s)} tokens/s")
    live = sum(1 for m in job.members if m["state"] == MemberState.RUNNING)
    parts.append(f"{live}/{job.view.get('nodes_wanted', len(job.members))} nodes")
    if job.steps or job.sent_bytes:
        parts.append(f"sent {screen.size(job.sent_bytes)}/node")
    return escape(" | ".join(parts))
