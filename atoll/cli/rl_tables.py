"""What policies came to, as a table for people at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from atoll.cli import screen
from atoll.train.rl_report import number, short_env
from atoll.train.rl_summary import step_word

CRITICS = {
    "pooled": "one critic for all policies, each with a head of its own",
    "unconditioned": "one critic for all policies, with one head",
    "corrected": "one critic for one task, from everybody's experience (V-trace)",
    "joint": "one critic that sees the joint state",
    "own": "a critic of its own in every policy",
    "none": "none: completions of one prompt are compared",
}


def rl_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return a row per policy, and below them what the run was."""
    rl = summary["rl"]
    written = [panel for policy in rl["policies"] for panel in _texts(policy)]
    return Group(_policies(rl), "", _facts(summary), *written)


def _texts(policy: Mapping[str, Any]) -> list[RenderableType]:
    """Return what a language model wrote in its examination."""
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
    """Return how many trajectories were lost to learning, by reason; nothing if none was."""
    counts: dict[str, int] = {}
    for row in [*rl["policies"], rl["critic_member"] or {"dropped": {}}]:
        for word, count in row["dropped"].items():
            counts[word] = counts.get(word, 0) + count
    told = [f"{count:,} {word.replace('_', ' ')}" for word, count in counts.items() if count]
    return f"[yellow]{', '.join(told)}[/]" if told else ""
