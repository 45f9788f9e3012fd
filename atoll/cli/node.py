"""`atoll node`: what an operator does with a machine of the hub."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def node() -> None:
    """Shut a machine out."""


@app.command()
def revoke(
    node: Annotated[str, typer.Argument(help="A node, as `atoll status` names it.")],
    hub: Annotated[str, typer.Option(help="URL of the hub (default: the last).")] = "",
) -> None:
    """Shut a machine out at once: token and certificate end, and what runs there is lost."""
    from atoll.cli import known_hub, screen

    with known_hub.find(hub).client() as client:
        tickets = client.revoke_node(node)["open_tickets"]
    console = screen.output()
    console.print(f"{node} is shut out", markup=False)
    for id in tickets:
        console.print(
            f"  the ticket it came with would still let it in again: atoll ticket revoke {id}",
            markup=False,
        )
