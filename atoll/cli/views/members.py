"""The table of a job's members, for the live view and for `atoll status`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from atoll.cli.views import screen
from atoll.cli.views.job import shown_state, traffic
from atoll.wire.states import MemberState

STATE_STYLE: dict[str, str] = {
    MemberState.RUNNING: "green",
    MemberState.DONE: "green",
    MemberState.LOST: "red",
    MemberState.FAILED: "red",
    MemberState.STOPPED: "yellow",
}


def members_table(members: list[dict[str, Any]]) -> RenderableType:
    """Return a row per member, and per further machine of one."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("node", no_wrap=True)
    kept = ["state", *_measured(members), "seen"]
    for heading in kept:
        table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    nodes = Counter(str(member["node"]) for member in members)
    island = any(member.get("follower_of") for member in members)
    for member in members:
        named = island or nodes[str(member["node"])] > 1
        name, cells = _member_row(member, named=named)
        table.add_row(name, *(cells[heading] for heading in kept))
    return table


def _measured(members: list[dict[str, Any]]) -> list[str]:
    """Return the columns that have values: a program need not train, or talk to others."""
    trains = any(m.get("step") or m.get("loss") is not None for m in members)
    talks = any(traffic(m, "sent_bytes") or traffic(m, "received_bytes") for m in members)
    return [
        *(["step", "loss", "tokens/s"] if trains else []),
        *(["sent", "received"] if talks else []),
    ]


def _member_row(member: dict[str, Any], *, named: bool) -> tuple[str, dict[str, str]]:
    """Return a member's name and its cells by column.

    `named`: its machine alone does not say which member it is.
    """
    seen, loss, state = member.get("last_seen_s"), member.get("loss"), shown_state(member)
    style = STATE_STYLE.get(str(member["state"]) if "," in state else state, "yellow")
    name = escape(str(member["node"]))
    return name + (f" [dim]{escape(str(member['member']))}[/]" if named else ""), {
        "state": f"[{style}]{escape(state)}[/]",
        "step": "-" if member.get("follower_of") else str(member.get("step") or 0),
        "loss": "-" if loss is None else f"{loss:.3f}",
        "tokens/s": screen.count(float(member.get("tokens_per_s") or 0.0)),
        "sent": screen.size(traffic(member, "sent_bytes")),
        "received": screen.size(traffic(member, "received_bytes")),
        "seen": "-" if seen is None else f"{seen:.0f} s",
    }
