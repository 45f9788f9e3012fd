"""The tables of docs/measured/benchmarks.md that `bench.pooled --page` makes from finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.pooled.groups import Group

BEGIN = "<!-- tables: python -m bench.pooled --report --page -->"
END = "<!-- end of pooled tables -->"


def with_tables(text: str, groups: Sequence[Group], result: Mapping[str, Any]) -> str:
    """Return a page with the tables made anew; one without their place stays as it is."""
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        return text
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{steps(groups, result)}\n{claims(result['claims'])}{END}{after}"


def steps(groups: Sequence[Group], result: Mapping[str, Any]) -> str:
    """Return the table of all tasks and variants."""
    heads = ["tasks", "critic", "seeds", "task", "steps to target", "never", "final return"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for group in groups:
        for variant, found in result[group.name].items():
            for task in group.tasks:
                figures = found["tasks"][task.name]
                cells = [
                    group.name, variant, str(found["seeds"]), f"{task.name} ({task.target:g})",
                    cell(figures["steps_to_target"], digits=0), str(figures["missed"]),
                    cell(figures["final_return"], digits=1),
                ]  # fmt: skip
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def claims(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of what was to be reached: the ratio of steps, and whether it was."""
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = ["| to reach | reached | ratio of steps to target |", "|---|---|---|"]
    for claim in found:
        ratio = claim["figures"]
        shown = f"{cell(ratio, digits=2)}, {ratio['seeds']} seeds" if ratio else ""
        lines.append(f"| {claim['claim']} | {words[claim['holds']]} | {shown} |")
    return "\n".join(lines) + "\n"


def cell(found: Mapping[str, Any], *, digits: int) -> str:
    """Return a mean with its interval, as people read it."""
    if found["mean"] is None:
        return "-"
    if found["low"] is None:
        return f"{found['mean']:,.{digits}f}"
    return (
        f"{found['mean']:,.{digits}f} ({found['low']:,.{digits}f} to {found['high']:,.{digits}f})"
    )
