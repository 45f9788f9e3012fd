"""The terminal view of policies that learn: a row each, and the critic below them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.cli import screen
from atoll.cli.rl_progress import (
    PolicyNow,
    critic_of,
    left_s,
    policies_of,
    share_done,
    sparkline,
    value,
)
from atoll.cli.watch import Watched, shown_state
from atoll.train.rl_report import number, short_env

GAP = 2
"""Cells between two columns."""

FEWEST_CELLS, MOST_CELLS = 8, 40
"""Of a curve."""

STATE_STYLE = {"running": "green", "done": "green", "lost": "red", "failed": "red"}


def rl_parts(job: Watched) -> list[RenderableType]:
    """Return what the view shows of a job of policies."""
    seats = job.view.get("seats") or []
    policies = policies_of(seats, job.members, job.returns)
    parts: list[RenderableType] = [_bar(job, policies), "", Fitted(policies)]
    critic = critic_of(seats, job.members)
    if critic is not None:
        parts.append(_critic_line(critic, policies))
    return [*parts, ""]


def rl_line(job: Watched) -> list[str]:
    """Return the parts of a plain line about policies."""
    seats = job.view.get("seats") or []
    policies = policies_of(seats, job.members, job.returns)
    parts = [f"steps {share_done(policies):.0%}"]
    if job.state == "running":
        parts.append(f"left {screen.duration(left_s(policies))}")
    parts += [" ".join([p.policy, number(p.now), *_trouble(p)]) for p in policies]
    critic = critic_of(seats, job.members)
    if critic is not None:
        parts.append(f"critic v{_version(critic, policies)}")
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """The table of policies, made for the room that there is."""

    policies: list[PolicyNow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table."""
        yield policies_table(self.policies, width=options.max_width)


def policies_table(policies: list[PolicyNow], *, width: int) -> RenderableType:
    """Return a row per policy: where it lives, how its return rose, how it works.

    Args:
        policies: What is shown.
        width: Cells of a line; where they are few, columns are left out and the curve is short.
    """
    columns = [column for column in COLUMNS if width >= column.from_width]
    taken = sum(column.cells + GAP for column in columns)
    names = max((len(policy.policy) for policy in policies), default=0) + 2
    curve = max(FEWEST_CELLS, min(MOST_CELLS, width - taken - names - GAP))
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    for column in columns:
        side = "left" if column.heading in ("environment", "so far") else "right"
        table.add_column(column.heading, justify=side, no_wrap=True, max_width=column.cells or None)  # type: ignore[arg-type]
    for policy in policies:
        table.add_row(_name(policy), *(column.text(policy, curve) for column in columns))
    return table


def _name(policy: PolicyNow) -> str:
    states = [shown_state(member) for member in policy.members]
    state = next((s for s in states if s not in ("running", "done")), states[0] if states else "")
    style = STATE_STYLE.get(state, "yellow")
    name = f"[{style}]\N{BLACK CIRCLE}[/] [bold]{escape(policy.policy)}[/]"
    return name if state in ("running", "done", "") else f"{name} [{style}]{escape(state)}[/]"


def _trouble(policy: PolicyNow) -> list[str]:
    """Return what is wrong with it, if something is."""
    states = {shown_state(member) for member in policy.members}
    return sorted(states & {"lost", "failed", "silent"})


def _critic_age(policy: PolicyNow) -> str:
    version = f"v{policy.value_version}" if policy.value_version else "-"
    if policy.critic_away_s:
        return f"[yellow]{version}, silent {policy.critic_away_s:.0f} s[/]"
    return version


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: its heading, and what it says of a policy."""

    heading: str
    cells: int
    """About how wide it is; 0: as wide as there is room."""
    from_width: int
    """Terminals with fewer cells do without it."""
    text: Callable[[PolicyNow, int], str]


COLUMNS = (
    Column("environment", 16, 92, lambda policy, _: escape(short_env(policy.env))),
    Column("return", 7, 0, lambda policy, _: f"[bold]{number(policy.now)}[/]"),
    Column("best", 7, 100, lambda policy, _: number(policy.best)),
    Column(
        "so far", 0, 0, lambda policy, curve: f"[green]{sparkline(policy.returns, width=curve)}[/]"
    ),
    Column("steps", 7, 0, lambda policy, _: screen.count(policy.env_steps)),
    Column("steps/s", 7, 0, lambda policy, _: screen.count(policy.steps_per_s)),
    Column("critic", 16, 0, lambda policy, _: _critic_age(policy)),
    Column("waited", 7, 108, lambda policy, _: f"{policy.queue_wait_s:.1f} s"),
)


def _critic_line(critic: dict[str, Any], policies: list[PolicyNow]) -> RenderableType:
    """Return what the critic does, in one line."""
    state = shown_state(critic)
    style = STATE_STYLE.get(state, "yellow")
    line = Text.from_markup(
        f"[{style}]\N{BLACK CIRCLE}[/] [bold]critic[/] [dim]{escape(str(critic['node']))}[/]"
    )
    if state not in ("running", "done"):
        line.append(f" {state}", style=style)
    loss, staleness = value(critic, "value_loss"), value(critic, "staleness")
    figures = {
        "version": f"{_version(critic, policies)}",
        "trajectories": screen.count(value(critic, "trajectories") or 0.0),
        "loss": "-" if loss is None else f"{loss:.3f}",
        "queue": screen.count(value(critic, "queue_depth") or 0.0),
        "staleness": "-" if staleness is None else f"{staleness:.1f}",
    }
    if dropped := value(critic, "dropped"):
        figures["dropped"] = screen.count(dropped)
    for name, text in figures.items():
        line.append(f"   {name} ", style="dim")
        line.append(text, style="bold")
    return line


def _version(critic: dict[str, Any], policies: list[PolicyNow]) -> int:
    told = value(critic, "value_version") or value(critic, "updates") or 0.0
    return int(max([told, *(policy.value_version for policy in policies)]))


def _bar(job: Watched, policies: list[PolicyNow]) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    share = 1.0 if job.state == "done" else share_done(policies)
    speed = screen.count(sum(policy.steps_per_s for policy in policies))
    text = f"{share:4.0%}  {speed} steps/s  left {screen.duration(left_s(policies))}"
    row.add_row(ProgressBar(total=1.0, completed=share), text)
    return Group(row)
