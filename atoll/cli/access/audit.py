"""`atoll audit`: the audit log of the hub."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def audit(
    last: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of entries; the newest are shown.")
    ] = 50,
    name: Annotated[str, typer.Option(help="Only entries about this user, node or job.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    hub: Annotated[str, typer.Option(help="URL of the hub (default: the last).")] = "",
) -> None:
    """Show joins, logins, changes and refusals, oldest first."""
    from rich.markup import escape
    from rich.table import Table

    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.cli.views.tables import WIDE

    with hub_access.find(hub).client() as client:
        rows = client.audit(limit=last, name=name)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("time", no_wrap=True)
    table.add_column("what happened", overflow="fold")
    console = screen.output()
    wide = console.width >= WIDE
    if wide:
        table.add_column("from", no_wrap=True)
    for row in rows:
        cells = [row["text"], row["address"]] if wide else [row["text"]]
        table.add_row(screen.moment(row["time"]), *map(escape, cells))
    console.print(table)
