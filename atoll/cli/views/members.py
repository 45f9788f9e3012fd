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
    for heading in ("state", "step", "loss", "tokens/s", "sent", "received", "seen"):
        table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    nodes = Counter(str(member["node"]) for member in members)
    island = any(member.get("follower_of") for member in members)
    for member in members:
        named = island or nodes[str(member["node"])] > 1
        table.add_row(*_member_row(member, named=named))
    return table


def _member_row(member: dict[str, Any], *, named: bool) -> list[str]:
    """Return the cells of a member; `named` where its machine alone does not say which it is."""
    seen, loss, state = member.get("last_seen_s"), member.get("loss"), shown_state(member)
    style = STATE_STYLE.get(str(member["state"]) if "," in state else state, "yellow")
    return [
        escape(str(member["node"]))
        + (f" [dim]{escape(str(member['member']))}[/]" if named else ""),
        f"[{style}]{escape(state)}[/]",
        "-" if member.get("follower_of") else str(member.get("step") or 0),
        "-" if loss is None else f"{loss:.3f}",
        screen.count(float(member.get("tokens_per_s") or 0.0)),
        screen.size(traffic(member, "sent_bytes")),
        screen.size(traffic(member, "received_bytes")),
        "-" if seen is None else f"{seen:.0f} s",
    ]
