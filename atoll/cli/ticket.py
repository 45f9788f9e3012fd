"""`atoll ticket`: the join ticket of a hub, again."""

from __future__ import annotations

from typing import Annotated

import typer


def ticket(
    hub: Annotated[str, typer.Option(help="URL of the hub (default: the last).")] = "",
) -> None:
    """Print the join ticket of the hub that runs on this machine."""
    from atoll.cli import known_hub
    from atoll.errors import AuthError

    with known_hub.find(hub).client() as client:
        found = client.hub().get("ticket")
    if not found:
        raise AuthError(
            "only the hub's own machine knows the ticket",
            given="the token of a node",
            remedy="run this where `atoll hub` was started",
        )
    typer.echo(found)
