"""`atoll keys`: the hub's own keys; show them, and replace them while jobs run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.access.ticket import HubOption, duration_s

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(invoke_without_command=True)

WHAT = ("authority", "certificate", "operator")


@app.callback()
def keys(context: typer.Context, hub: HubOption = "") -> None:
    """Show the hub's authority and certificate, and how long they are valid."""
    if context.invoked_subcommand is not None:
        return
    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        found = client.keys()
    console = screen.output()
    if not found["authorities"]:
        console.print("this hub has no authority of its own: no TLS, or a certificate of --tls")
    for place, authority in enumerate(found["authorities"]):
        state = f"from {screen.moment(found['switch_at'])}" if place else "now"
        ends = screen.moment(authority["ends"])
        console.print(f"authority    {authority['fingerprint']}  {state}, valid until {ends}")
    if "certificate_ends" in found:
        console.print(f"certificate  valid until {screen.moment(found['certificate_ends'])}")


@app.command()
def rotate(
    what: Annotated[
        str,
        typer.Argument(
            help="authority (of all certificates), certificate (the hub's own), or operator (the "
            "token that the hub prints)."
        ),
    ],
    overlap: Annotated[
        str,
        typer.Option(help="How long what is replaced stays valid, e.g. 1h, 7d; 0: ends at once."),
    ] = "",
    hub: HubOption = "",
) -> None:
    """Replace a key of the hub. Jobs and connected nodes go on."""
    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.errors import unknown

    if what not in WHAT:
        raise unknown("key", what, WHAT)
    overlap_s = duration_s(overlap or {"authority": "7d", "operator": "1h"}.get(what, "0"))
    known = hub_access.find(hub)
    with known.client() as client:
        done = client.rotate(what, overlap_s=overlap_s)
    if done.get("by") == "operator" and what == "operator":
        hub_access.remember(dataclasses.replace(known, token=done["token"]))
    _tell(screen.output(), done, url=known.url, overlap_s=overlap_s)


def _tell(console: Console, done: dict[str, Any], *, url: str, overlap_s: float) -> None:
    from atoll.cli.views import screen

    what = done["what"]
    if what == "operator":
        console.print(f"dashboard   {url}/?token={done['token']}", soft_wrap=True, markup=False)
        console.print(_until("the old token", overlap_s))
    elif what == "certificate":
        console.print(f"the hub shows a new certificate, valid until {screen.moment(done['ends'])}")
    elif overlap_s:
        at = screen.moment(done["switch_at"])
        console.print(f"the hub has another authority from {at}", soft_wrap=True)
        console.print(
            "nodes that connect until then, and people whose commands reach the hub, know it "
            "afterwards; others need a fresh ticket then",
            soft_wrap=True,
        )
    else:
        console.print(
            "the hub has another authority now: every node joins again, every person logs in "
            "again, with a fresh ticket (`atoll ticket`, `atoll ticket new`)",
            soft_wrap=True,
        )


def _until(what: str, overlap_s: float) -> str:
    return f"{what} is good for {overlap_s:.0f} s more" if overlap_s else f"{what} has ended"
