"""`atoll drain`: have a machine give its work back, e.g. before it is shut down."""

from __future__ import annotations

from typing import Annotated

import typer


def drain(
    node: Annotated[str, typer.Argument(help="A node, as `atoll status` names it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    reason: Annotated[str, typer.Option(help="Shown to everybody.")] = "",
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Have a machine finish or abandon its round within 5 s, and take no more work."""
    from atoll.cli import known_hub, screen

    with known_hub.find(hub).client() as client:
        client.drain(node, draining=not undo, reason=reason)
    told = "takes work again" if undo else "gives its work back and takes no more"
    screen.output().print(f"{node} {told}")
