"""`atoll login`, `atoll logout`: let commands on this machine use a hub as operator or viewer."""

from __future__ import annotations

from typing import Annotated

import typer


def login(
    ticket: Annotated[
        str,
        typer.Argument(
            help="Ticket from `atoll ticket new --role ...`, or @FILE that contains it."
        ),
    ] = "",
    name: Annotated[
        str, typer.Option(help="Your name in the audit log (default: user-host).")
    ] = "",
    via_proxy: Annotated[str, typer.Option(help="URL of the proxy to the hub.")] = "",
) -> None:
    """Let commands on this machine view a hub (viewer) or control it (operator)."""
    from atoll.cli import hub_access
    from atoll.cli.ticket_argument import read_ticket
    from atoll.cli.views import screen
    from atoll.errors import ConfigError

    parsed_ticket = read_ticket(ticket)
    if parsed_ticket is None:
        raise ConfigError("a ticket is missing", remedy=hub_access.HOW_TO_LOG_IN)
    hub = hub_access.log_in(parsed_ticket, name=name, proxy=via_proxy)
    role = "operator" if hub.operator else "viewer"
    text = f"logged in at {hub.url} as {role}; log out with `atoll logout`"
    screen.output().print(text, markup=False)


def logout(
    hub: Annotated[str, typer.Option(help="URL of the hub (default: the last).")] = "",
) -> None:
    """End this machine's login at a hub, on both sides."""
    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.errors import AtollError

    known = hub_access.find(hub)
    console = screen.output()
    try:
        with known.client() as client:
            client.log_out()
    except AtollError as error:  # the login on this machine is removed anyway
        console.print(f"the hub could not be notified ({error.what})", markup=False)
    hub_access.forget(known)
    console.print(f"{known.url} removed from this machine", markup=False)
