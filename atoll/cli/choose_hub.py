"""Let the user choose one of the hubs on this network, and ask for its ticket."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from atoll.errors import AuthError, ConfigError
from atoll.net.endpoint import Ticket, parse_ticket

if TYPE_CHECKING:
    from atoll.node.identity.discovery import FoundHub


def choose_hub(console: Console) -> Ticket:
    """Return a ticket for the hub that the user chose.

    Raises:
        ConfigError: standard input is not a terminal, or no hub announces itself here.
        AuthError: the given ticket is of another hub than the chosen one.
    """
    import typer

    from atoll.node.identity.discovery import find_hubs

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "a machine needs a ticket to join",
            given="no ticket, and standard input is not a terminal",
            expected="atoll join atoll://HOST:PORT/SECRET, or the variable ATOLL_TICKET",
            remedy="take the ticket that `atoll hub` printed, or make one: atoll ticket new",
        )
    console.print("looking for hubs on this network ...")
    hubs = find_hubs()
    if not hubs:
        raise ConfigError(
            "no hub announces itself on this network",
            expected="a hub started with --announce, or on an address that is not loopback",
            remedy="give the ticket that `atoll hub` printed: it works across networks, too",
        )
    for number, hub in enumerate(hubs, start=1):
        console.print(f"  {number}  {_line(hub)}", soft_wrap=True)
    number = 1
    if len(hubs) == 1:
        typer.confirm("Join this hub?", default=True, abort=True)
    else:
        number = typer.prompt("Which one?", type=int)
    if not 1 <= number <= len(hubs):
        raise ConfigError(
            "there is no such hub in the list", given=number, expected=f"1 to {len(hubs)}"
        )
    chosen = hubs[number - 1]
    console.print(
        "Compare the fingerprint with the end of the ticket that the hub printed: "
        "any machine on this network can announce anything."
        if chosen.fingerprint
        else "This hub does not use TLS itself: the ticket is sent unencrypted.",
        soft_wrap=True,
    )
    given = str(
        typer.prompt("Ticket, or its secret part (input is hidden)", hide_input=True)
    ).strip()
    return ticket_for(chosen, given)


def ticket_for(chosen: FoundHub, given: str) -> Ticket:
    """Return the ticket for a chosen hub, from a whole ticket or its secret part.

    Raises:
        AuthError: it is the ticket of another hub.
        ConfigError: it is not a ticket.
    """
    if "://" in given:
        whole = parse_ticket(given)
        if whole.mark != chosen.mark:
            raise AuthError(
                "this is not the hub of that ticket",
                given=f"fingerprint {chosen.fingerprint or 'none'} announced by {chosen.name}",
                expected=f"fingerprint {whole.fingerprint or 'none'}, as the ticket says",
                remedy="choose another hub, or join with the ticket alone",
            )
        return chosen.ticket(whole.secret)
    secret, _, mark = given.partition("~")
    if mark and mark != chosen.mark:
        return ticket_for(chosen, str(chosen.ticket(secret)).partition("~")[0] + f"~{mark}")
    return parse_ticket(str(chosen.ticket(secret)))


def _line(hub: FoundHub) -> str:
    trust = f"fingerprint {hub.fingerprint}" if hub.fingerprint else "no fingerprint"
    where = str(hub.ticket("")).removeprefix("atoll://").partition("~")[0].rstrip("/")
    return f"[bold]{escape(hub.name)}[/] at {escape(where)}, {trust}, version {escape(hub.version)}"
