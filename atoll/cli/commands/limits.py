"""`atoll limits`: who uses how much of the hub, and which limits are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table


def limits(
    all_: Annotated[
        bool, typer.Option("--all", help="All users, not only those who use most.")
    ] = False,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show how much each token, node and job uses of what it may use; reached limits are red."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        found = client.limits(all_=all_)
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    console = screen.output()
    console.print(limits_table(found["uses"]), soft_wrap=True)
    if (left_out := found["number"] - len(found["uses"])) > 0:
        console.print(f"[dim]and {left_out} more: atoll limits --all[/]")


def limits_table(uses: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row per holder and limit, the fullest first."""
    from rich.markup import escape
    from rich.table import Table

    from atoll.cli.views import screen

    table = Table(box=None, pad_edge=False)
    for heading in ("limit", "who", "used", "of", "", "refused"):
        table.add_column(heading, justify="right" if heading in ("used", "of", "") else "left")
    for use in uses:
        figure = screen.size if use["in_bytes"] else _number
        part = f"{use['used'] / use['limit']:.0%}" if use["limit"] else ""
        refused = ""
        if use["refused"]:
            times = "once" if use["refused"] == 1 else f"{use['refused']} times"
            refused = f"{times}, last {screen.moment(use['refused_at'])}"
        table.add_row(
            use["kind"], escape(use["who"]), figure(use["used"]),
            figure(use["limit"]) if use["limit"] else "any", part, refused,
            style="red" if use["reached"] else None,
        )  # fmt: skip
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}"
