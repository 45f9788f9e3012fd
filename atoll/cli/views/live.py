"""The live terminal view of a running job; plain lines without a terminal.

`Picture` saves one frame of the view with the results as SVG.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen
from atoll.cli.views.job import Watched, shown_job_state
from atoll.cli.views.members import members_table
from atoll.cli.views.paths import paths_part
from atoll.cli.views.rl import rl_line, rl_parts
from atoll.cli.views.swarm import stages_part
from atoll.wire.states import JobState, MemberState

WIDTH = 100
MOMENT = 0.6
"""The saved frame is the last one before this share of the steps is done."""


class Picture:
    """Keeps a frame during the run; `save` adds the results below it."""

    def __init__(self, path: Path) -> None:
        """Write to `path` in the end."""
        self.path = path
        self._frame: RenderableType | None = None

    def offer(self, frame: RenderableType, *, share: float) -> None:
        """Pass the current frame, with the share of the steps done."""
        if share <= MOMENT or self._frame is None:
            self._frame = frame

    def save(self, title: str, results: Callable[[Console], None]) -> None:
        """Write the file; `results` prints below the frame."""
        console = Console(
            record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
        )
        if self._frame is not None:
            console.print(self._frame)
        results(console)
        # Viewers would fetch remote fonts, and tokens are secret: remove both.
        drawn = re.sub(
            r"@font-face\s*\{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL
        )
        drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.DOTALL)
        # Keep the length: the SVG stores the width of every line.
        drawn = re.sub(r"(?<=token=)[\w-]+", lambda token: "." * len(token[0]), drawn)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(drawn, encoding="utf-8", newline="\n")


PLAIN_EVERY_S = 5.0
"""Interval between plain lines: informative, but not too much for a CI log."""

QUIET_EVENTS = frozenset(
    {"submitted", "waiting", "assigned", "started", "running", "checkpoint"}
    | {"member-done", "done", "failed", "stopped"}
)
"""Events that the view shows anyway, or that the command reports at its end."""

SILENT = ("trainer", "rl")
"""Job kinds whose members' output is not shown above the view, which shows the same."""


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
        """`note` is a line under the view, e.g. what Ctrl+C will do; `picture` is shown frames."""
        self._still = picture
        self._console = console
        self.dashboard = dashboard
        self._note = note
        self._live: Live | None = None
        self._drawn = False
        self._last_plain = -math.inf
        self._loss_shown = False
        self._started = time.monotonic()

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

    def line(self, line: dict[str, Any]) -> None:
        """Print one output line of a member above the view."""
        screen.log_line(self._console, line)

    def show(self, job: Watched, *, last: bool = False) -> None:
        """Draw the job's current state; `last` also prints a plain line that is not due."""
        for event in job.events:
            if event["kind"] not in QUIET_EVENTS:
                line = f"[dim]{escape(event.get('member') or job.job)}: {escape(event['text'])}[/]"
                self._console.print(line, soft_wrap=True)
        if self._still is not None and job.steps:
            self._still.offer(self._picture(job), share=job.step / job.steps)
        if self._live is not None:
            self._drawn = True
            self._live.update(self._picture(job), refresh=True)
        elif last or self._is_due(job):
            self._last_plain = time.monotonic()
            self._console.print(plain_line(job), soft_wrap=True)

    def _is_due(self, job: Watched) -> bool:
        """Return whether to print a plain line: after every interval, and for the first loss."""
        first = job.loss is not None and not self._loss_shown
        self._loss_shown = self._loss_shown or first
        return first or time.monotonic() - self._last_plain >= PLAIN_EVERY_S

    def _picture(self, job: Watched) -> RenderableType:
        swarm, paths = job.view.get("swarm"), job.view.get("paths")
        parts: list[RenderableType] = [
            stages_part(swarm) if swarm is not None else members_table(job.processes)
        ]
        if paths is not None:
            parts.append(paths_part(paths))
        kind = job.view.get("kind")
        if kind == "rl":
            parts = rl_parts(job)
        elif kind != "command":  # which reports no steps
            parts = [_bar(job), _figures(job), *parts]
        footer = Text(f"dashboard  {self.dashboard}", style="dim", overflow="fold")
        if self._note:
            footer.append(f"\n{self._note}")
        state = shown_job_state(job.view)
        if job.view.get("reason"):
            state = f"{state}: {job.view['reason']}"
        elapsed = screen.duration(time.monotonic() - self._started)
        title = f"[bold]{escape(job.job)}[/]  {escape(state)}  {elapsed}"
        return Panel(Group(*parts, footer), title=title, title_align="left", border_style="cyan")


def plain_line(job: Watched) -> str:
    """Return the state of a job as one line."""
    parts = [f"{job.job} {shown_job_state(job.view)}"]
    if job.state == JobState.WAITING and job.view.get("reason"):
        parts.append(str(job.view["reason"]))
    if job.view.get("kind") == "rl":
        return escape(" | ".join([*parts, *rl_line(job)]))
    swarm = job.view.get("swarm")
    if swarm is not None and swarm["paused"]:
        parts.append(swarm["paused"])
    if job.steps:
        parts.append(f"step {job.step}/{job.steps}")
    if job.state == JobState.RUNNING and job.steps:
        parts.append(f"left {screen.duration(job.left_s())}")
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


def _bar(job: Watched) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    share = job.step / job.steps if job.steps else 0.0
    text = f"{share:4.0%}  step {job.step}/{job.steps}  left {screen.duration(job.left_s())}"
    row.add_row(ProgressBar(total=max(1, job.steps), completed=job.step), text)
    return row


def _figures(job: Watched) -> RenderableType:
    row = Table.grid(padding=(0, 3))
    loss = "-" if job.loss is None else f"{job.loss:.3f}"
    held_out = "-" if job.held_out is None else f"{job.held_out:.3f}"
    speed = screen.count(job.tokens_per_s)
    row.add_row(
        f"[dim]loss[/] [bold]{loss}[/]",
        f"[dim]held-out[/] [bold]{held_out}[/]",
        f"[dim]tokens/s[/] [bold]{speed}[/]",
        f"[dim]rounds[/] [bold]{job.view.get('committed_round', 0)}[/]",
    )
    traffic = Text.from_markup(f"[dim]sent per node[/] [bold]{screen.size(job.sent_bytes)}[/]")
    other = job.data_parallel_bytes
    if other:
        times = f"  ({other / job.sent_bytes:,.0f} x less)" if job.sent_bytes else ""
        traffic.append_text(
            Text.from_markup(f" [dim]against[/] {screen.size(other)} [dim]by data parallel[/]")
        )
        traffic.append(times, style="bold green")
    return Group(row, traffic)
