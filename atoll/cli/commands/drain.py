"""`atoll drain`: take a machine out of work, e.g. before it is shut down; `atoll node revoke`."""

from __future__ import annotations

from typing import Annotated

import typer


def drain(
    node: Annotated[str, typer.Argument(help="Name of the node, as shown by `atoll status`.")],
    undo: Annotated[bool, typer.Option("--undo", help="Accept work again.")] = False,
    reason: Annotated[str, typer.Option(help="Reason, shown beside the node.")] = "",
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Let a machine finish or abandon its round within 5 s, and give it no more work."""
    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        client.drain(node, draining=not undo, reason=reason)
    outcome = "accepts work again" if undo else "returns its work and accepts no more"
    screen.output().print(f"{node} {outcome}")


app = typer.Typer(no_args_is_help=True)


@app.callback()
def node() -> None:
    """Manage the access of machines."""


@app.command()
def revoke(
    node: Annotated[str, typer.Argument(help="Name of the node, as shown by `atoll status`.")],
    hub: Annotated[str, typer.Option(help="URL of the hub (default: the last).")] = "",
) -> None:
    """Revoke a machine's access at once: token and certificate end, its running work is lost."""
    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        tickets = client.revoke_node(node)["open_tickets"]
    console = screen.output()
    console.print(f"{node}: access revoked", markup=False)
    for id in tickets:
        console.print(
            f"  its ticket is still valid; revoke it too: atoll ticket revoke {id}",
            markup=False,
        )
