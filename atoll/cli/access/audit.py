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
    from rich.table import Table

    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        rows = client.audit(limit=last, name=name)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("time", "role", "name", "address", "action", "target", "outcome"):
        table.add_column(heading)
    for row in rows:
        cells = (row["role"] or "stranger", row["name"], row["address"], row["action"])
        table.add_row(screen.moment(row["time"]), *cells, row["target"], row["outcome"])
    screen.output().print(table)
