"""`atoll join` without a ticket: find a hub on this network and pair with it by its code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from atoll.errors import ConfigError, WrongCode
from atoll.net.endpoint import Ticket
from atoll.net.proxies import at_address

if TYPE_CHECKING:
    from atoll.node.identity.discovery import FoundHub

NO_HUB = (
    "check that both machines are in the same network (not a guest Wi-Fi, no VPN) and that the "
    "first one's firewall lets in TCP port 7700 and UDP port 5353; then `atoll join --hub ADDRESS` "
    "with the address that `atoll up` shows, or the line that it shows for the internet"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is known of the hub to join."""

    home: Path
    """Folder of this node."""
    code: str = ""
    """Pairing code; empty: ask for it."""
    address: str = ""
    """HOST or HOST:PORT; empty: look for hubs on this network."""
    proxy: str = ""
    """URL of a proxy, or `direct`; empty: from the environment."""


def choose_hub(console: Console, wanted: Wanted) -> Ticket:
    """Return a ticket for the hub that is found or chosen, from a pairing by code.

    A machine that has joined the hub before needs no code.

    Raises:
        ConfigError: no hub answers, several do and there is no terminal to choose, or a code is
            needed and there is no terminal to ask for it.
        AuthError: the code is wrong or the hub has none.
    """
    from atoll.node.identity import pairing
    from atoll.node.identity.discovery import hub_at

    may_ask = sys.stdin.isatty() and sys.stdout.isatty()
    if not (wanted.code or wanted.address or may_ask):
        raise ConfigError(
            "a machine needs a ticket or a pairing code to join",
            given="neither, and standard input is not a terminal",
            expected="atoll join TICKET, atoll join --code 123-456, ATOLL_TICKET or ATOLL_CODE",
            remedy="`atoll up` on the hub's machine shows both; `atoll ticket` prints a ticket",
        )
    found = hub_at(wanted.address) if wanted.address else _look(console, may_ask=may_ask)
    if wanted.code:
        return pairing.pair(found, wanted.code, proxy=wanted.proxy)
    if known := pairing.already_joined(found, home=wanted.home):
        console.print("this machine has joined that hub before", style="dim")
        return known
    if not may_ask:
        raise ConfigError("a pairing code is missing", expected="--code 123-456, or ATOLL_CODE")
    return _ask(console, found, proxy=wanted.proxy)


def _look(console: Console, *, may_ask: bool) -> FoundHub:
    """Return the only hub of this network, or the chosen one."""
    import typer

    from atoll.node.identity.discovery import find_hubs

    console.print("looking for hubs on this network ...")
    hubs = find_hubs()
    if not hubs:
        raise ConfigError(
            "no hub answers on this network",
            expected="`atoll up` or `atoll hub` running on another machine of it",
            remedy=NO_HUB,
        )
    for number, hub in enumerate(hubs, start=1):
        console.print(f"  {number}  {_line(hub)}", soft_wrap=True)
    if len(hubs) == 1:
        return hubs[0]
    if not may_ask:
        raise _several(hubs)
    number = int(typer.prompt("Which one?", type=int))
    if not 1 <= number <= len(hubs):
        raise ConfigError(
            "there is no such hub in the list", given=number, expected=f"1 to {len(hubs)}"
        )
    return hubs[number - 1]


def _ask(console: Console, found: FoundHub, *, proxy: str) -> Ticket:
    """Ask for the code until it is right or the hub accepts no more tries."""
    import typer

    from atoll.node.identity.pairing import pair

    while True:
        code = str(typer.prompt("Pairing code, shown by `atoll up` and on the hub's page"))
        try:
            return pair(found, code, proxy=proxy)
        except WrongCode as error:
            if str(error.given).startswith("0"):
                raise
            console.print(f"[red]{escape(error.what)}[/]; {error.given}", soft_wrap=True)
        except ConfigError as error:
            if not error.expected:
                raise
            console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)


def _several(hubs: Sequence[FoundHub]) -> ConfigError:
    return ConfigError(
        "several hubs answer on this network",
        given=", ".join(f"{hub.name} at {at_address(hub.host, hub.port)}" for hub in hubs),
        remedy="choose one: atoll join --hub HOST:PORT --code 123-456",
    )


def _line(hub: FoundHub) -> str:
    where = at_address(hub.host, hub.port) + hub.prefix
    trust = f"fingerprint {hub.fingerprint[:16]}" if hub.fingerprint else "no fingerprint"
    return f"[bold]{escape(hub.name)}[/] at {escape(where)}, {trust}, version {escape(hub.version)}"
