"""The page of a simulation, for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from atoll.config.sizes import size_text
from atoll.units import duration

if TYPE_CHECKING:
    from atoll.simulate.record import Outcome

WIDTH = 80
BAR = 24
COLUMNS = 60
"""Of the timeline."""

CAUSES = {
    "useful": "steps of committed rounds",
    "waiting": "waiting for the slowest",
    "communicating": "exchange and verdict",
    "lost work": "steps that no round contains",
    "recovering": "starting, taking over the state",
    "absent": "no machine: it had failed",
    "spare": "spare: enough others were there",
}

MARKS = "0123456789"


def page(outcome: Outcome, words: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a page."""
    hours = outcome.simulated_s / 3600
    spare = outcome.machines > outcome.members
    machines = f" on {outcome.machines:,} machines" if spare else ""
    yield (
        f"{outcome.members:,} members{machines}, {hours:.4g} hours    goodput {outcome.goodput:.1%}"
    )
    yield ""
    for name, share in outcome.shares.items():
        if name == "spare" and not share:
            continue
        bar = "#" * round(BAR * share)
        yield f"  {CAUSES[name]:<32} {share:>6.1%}  {bar}".rstrip()
    yield ""
    yield from _figures(outcome)
    yield ""
    yield from _drawn(outcome)
    yield ""
    yield "What breaks first"
    for line in words:
        indent = "    " if line.startswith("  ") else "  "
        yield from textwrap.wrap(
            line.strip(), WIDTH, initial_indent=indent, subsequent_indent="      "
        )
    for note in outcome.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")


def _figures(outcome: Outcome) -> Iterator[str]:
    yield (
        f"rounds    {outcome.rounds_committed:,} committed, {outcome.rounds_aborted:,} aborted, "
        f"{outcome.round_s:,.1f} s from the first join to the verdict"
    )
    yield (
        f"members   {outcome.mean_members:,.1f} on average, at least {outcome.least_members:,}; "
        f"paused for {duration(outcome.paused_s)}"
    )
    yield (
        f"steps     {outcome.steps:,} in committed rounds"
        + (f", {outcome.ended} after {duration(outcome.simulated_s)}" if outcome.ended else "")
    )
    yield (
        f"bytes     {size_text(outcome.member_bytes)} sent by members, "
        f"{size_text(outcome.relay_bytes)} through the hub"
    )
    yield (
        f"hub       {outcome.messages_per_s:,.1f} messages/s, {outcome.hub_share:.1%} of a core, "
        f"line in {outcome.hub_down_share:.0%} out {outcome.hub_up_share:.0%}"
    )
    machine = outcome.measured["us_per_event"]
    timed = ", ".join(f"{kind} {machine[kind]:.0f}" for kind in ("join", "vote") if kind in machine)
    if timed:
        yield f"measured  round machine, µs per event here: {timed}"
    queues = "; ".join(f"{name} {size:,.1f}" for name, size in sorted(outcome.queues.items()))
    yield from textwrap.wrap(f"queues    longest: {queues}", WIDTH, subsequent_indent=" " * 10)
    happened = ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.events.items()))
    if happened:
        yield from textwrap.wrap(f"events    {happened}", WIDTH, subsequent_indent=" " * 10)


def _drawn(outcome: Outcome) -> Iterator[str]:
    """Yield the timeline: per column the committed and aborted rounds, and who took part."""
    column_s = outcome.simulated_s / COLUMNS
    committed: list[int] = [0] * COLUMNS
    aborted: list[int] = [0] * COLUMNS
    present: list[float] = [0.0] * COLUMNS
    for row in outcome.timeline:
        place = min(COLUMNS - 1, int(_ended(row) / column_s))
        if row["committed"]:
            committed[place] += 1
            present[place] = max(present[place], row["contributors"] / outcome.members)
        elif row["decided_s"]:
            aborted[place] += 1
    yield f"timeline  {column_s / 60:,.1f} minutes per column"
    yield "  committed   " + "".join(_digit(count) for count in committed)
    yield "  aborted     " + "".join(_digit(count) for count in aborted)
    yield "  tenths in   " + "".join(_digit(round(10 * share)) for share in present)


def _ended(row: dict[str, Any]) -> float:
    return float(row["decided_s"] or row["planned_s"])


def _digit(count: int) -> str:
    return "." if not count else MARKS[count] if count < len(MARKS) else "*"
