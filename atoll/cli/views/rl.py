"""Terminal view of reinforcement learning: a row per policy, the critic, and the final results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen
from atoll.cli.views.job import (
    PolicyNow,
    Watched,
    critic_of,
    policies_of,
    share_done,
    shown_state,
    sparkline,
    value,
)
from atoll.train.report.rl import number, short_env
from atoll.train.results.rl_summary import step_word
from atoll.wire.states import JobState, MemberState

GAP = 2
"""Cells between two columns."""

FEWEST_CELLS, MOST_CELLS = 8, 40
"""Of a curve."""

_WELL = (MemberState.RUNNING, MemberState.DONE)
STATE_STYLE: dict[str, str] = {
    MemberState.RUNNING: "green",
    MemberState.DONE: "green",
    MemberState.LOST: "red",
    MemberState.FAILED: "red",
}


def rl_parts(job: Watched) -> list[RenderableType]:
    """Return what the view shows of a job of policies."""
    roles = job.view.get("roles") or []
    policies = policies_of(roles, job.members, job.returns)
    parts: list[RenderableType] = [_bar(job, policies), "", Fitted(policies)]
    critic = critic_of(roles, job.members)
    if critic is not None:
        parts.append(_critic_line(critic, policies))
    return [*parts, ""]


def rl_line(job: Watched) -> list[str]:
    """Return the parts of a plain line about policies."""
    roles = job.view.get("roles") or []
    policies = policies_of(roles, job.members, job.returns)
    parts = [f"steps {share_done(policies):.0%}"]
    if job.state == JobState.RUNNING:
        parts.append(f"ETA {screen.duration(job.left_s)}")
    parts += [" ".join([p.policy, number(p.now), *_trouble(p)]) for p in policies]
    critic = critic_of(roles, job.members)
    if critic is not None:
        parts.append(f"critic v{_version(critic, policies)}")
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """The table of policies, fitted to the available width."""

    policies: list[PolicyNow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table."""
        yield policies_table(self.policies, width=options.max_width)


def policies_table(policies: list[PolicyNow], *, width: int) -> RenderableType:
    """Return a row per policy: its node, its return over time, its speed.

    Args:
        policies: What is shown.
        width: Cells of a line; narrow tables leave columns out and shorten the curve.
    """
    columns = [column for column in COLUMNS if width >= column.from_width]
    used = sum(column.cells + GAP for column in columns)
    names = max((len(policy.policy) for policy in policies), default=0) + 2
    curve = max(FEWEST_CELLS, min(MOST_CELLS, width - used - names - GAP))
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
    state = next((s for s in states if s not in _WELL), states[0] if states else "")
    style = STATE_STYLE.get(state, "yellow")
    name = f"[{style}]\N{BLACK CIRCLE}[/] [bold]{escape(policy.policy)}[/]"
    return name if state in (*_WELL, "") else f"{name} [{style}]{escape(state)}[/]"


def _trouble(policy: PolicyNow) -> list[str]:
    """Return the policy's problems, if any."""
    states = {shown_state(member) for member in policy.members}
    return sorted(states & {MemberState.LOST, MemberState.FAILED, "silent"})


def _critic_age(policy: PolicyNow) -> str:
    version = f"v{policy.value_version}" if policy.value_version else "-"
    if policy.critic_away_s:
        return f"[yellow]{version}, silent {policy.critic_away_s:.0f} s[/]"
    return version


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: its heading, and its text for a policy."""

    heading: str
    cells: int
    """Its approximate width; 0: the remaining width."""
    from_width: int
    """Narrower terminals leave it out."""
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
    if state not in _WELL:
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
    version = value(critic, "value_version") or value(critic, "updates") or 0.0
    return int(max([version, *(policy.value_version for policy in policies)]))


def _bar(job: Watched, policies: list[PolicyNow]) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    share = 1.0 if job.state == JobState.DONE else share_done(policies)
    speed = screen.count(sum(policy.steps_per_s for policy in policies))
    text = f"{share:4.0%}"
    if not job.ended:
        text += f"  {speed} steps/s  ETA {screen.duration(job.left_s)}"
    row.add_row(ProgressBar(total=1.0, completed=share), text)
    return Group(row)


CRITICS = {
    "pooled": "one critic for all policies, with a head for each",
    "unconditioned": "one critic for all policies, with one head",
    "corrected": "one critic for one task, from all policies' experience (V-trace)",
    "joint": "one critic that sees the joint state",
    "own": "a separate critic for each policy",
    "none": "none: completions of one prompt are compared",
}


def rl_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return a row per policy, and below them the figures of the run."""
    rl = summary["rl"]
    written = [panel for policy in rl["policies"] for panel in _texts(policy)]
    return Group(_policies(rl), "", _facts(summary), *written)


def _texts(policy: Mapping[str, Any]) -> list[RenderableType]:
    """Return what a language model wrote in its evaluation."""
    texts = [str(text) for text in policy.get("texts") or ()]
    if not texts:
        return []
    title = f"{escape(policy['policy'])} writes"
    before, after = policy.get("score_before"), policy.get("score_after")
    if before is not None and after is not None:
        title += f", right {before:.0%} of the time before and {after:.0%} now"
    return [Panel(escape("\n".join(texts)), title=title, title_align="left")]


def _policies(rl: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    table.add_column("environment", max_width=22, no_wrap=True, overflow="ellipsis")
    for heading in ("first", "return", "best", "episodes", "steps", "updates"):
        table.add_column(heading, justify="right", no_wrap=True)
    for policy in rl["policies"]:
        first, last = policy["return_first"], policy["return_last"]
        rose = first is not None and last is not None and last > first
        name = f"[bold]{escape(policy['policy'])}[/]"
        table.add_row(
            name if policy["finished"] else f"{name} [red]unfinished[/]",
            escape(short_env(policy["env"])),
            number(first),
            f"[bold {'green' if rose else 'yellow'}]{number(last)}[/]",
            number(policy["return_best"]),
            f"{policy['episodes']:,}",
            screen.count(policy["env_steps"]),
            f"{policy['updates']:,}",
        )
    return table


def _facts(summary: Mapping[str, Any]) -> Table:
    rl = summary["rl"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    speed, size = rl.get("env_steps_per_s"), rl.get("bytes_per_env_step")
    rows = {
        "algorithm": escape(rl["algorithm"]),
        "critic": escape(CRITICS.get(rl["critic"], rl["critic"])),
        "learned": _learned(rl),
        f"{step_word(rl)}s": f"{rl['env_steps']:,}" + (f", {speed:,.0f} a second" if speed else ""),
        "time": screen.duration(summary["wall_s"]),
        "on the wire": "-" if not size else f"{size:,.0f} bytes per {step_word(rl)}",
        "dropped": _dropped(rl),
    }
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


def _learned(rl: Mapping[str, Any]) -> str:
    critic = rl["critic_member"]
    if not critic:
        return ""
    text = f"{critic['trajectories']:,} trajectories in {critic['updates']:,} updates of the critic"
    ages = {int(age): count for age, count in critic["staleness"].items()}
    total = sum(ages.values())
    if total:
        mean = sum(age * count for age, count in ages.items()) / total
        text += f", {mean:.1f} updates old on average, {max(ages)} at most"
    return text


def _dropped(rl: Mapping[str, Any]) -> str:
    """Return how many trajectories were not learned, by reason; nothing if none was."""
    counts: dict[str, int] = {}
    for row in [*rl["policies"], rl["critic_member"] or {"dropped": {}}]:
        for word, count in row["dropped"].items():
            counts[word] = counts.get(word, 0) + count
    reasons = [f"{count:,} {word.replace('_', ' ')}" for word, count in counts.items() if count]
    return f"[yellow]{', '.join(reasons)}[/]" if reasons else ""
