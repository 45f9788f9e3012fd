"""`atoll ticket`: tickets that admit machines and people; `new`, `list`, `revoke`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.net.http.client import HubClient

app = typer.Typer(invoke_without_command=True)

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

HubOption = Annotated[str, typer.Option(help="URL of the hub (default: the last).")]


@app.callback()
def ticket(context: typer.Context, hub: HubOption = "") -> None:
    """Print the join ticket that the hub printed when it started."""
    if context.invoked_subcommand is not None:
        return
    from atoll.errors import AuthError

    with _client(hub) as client:
        found = client.hub().get("ticket")
    if not found:
        raise AuthError(
            "only operators may see tickets",
            given="a viewer's login",
            remedy="run this where `atoll hub` was started",
        )
    typer.echo(found)


@app.command()
def new(
    role: Annotated[
        str,
        typer.Option(
            help="node (`atoll join`), viewer, operator (`atoll login`), program (queues)."
        ),
    ] = "node",
    uses: Annotated[int, typer.Option(min=0, help="Maximum number of uses; 0: unlimited.")] = 1,
    valid: Annotated[str, typer.Option(help="Validity, e.g. 30m, 2h, 7d; 0: unlimited.")] = "2h",
    name: Annotated[str, typer.Option(help="Note shown in the list of tickets.")] = "",
    quota: Annotated[
        list[str] | None,
        typer.Option(help="Limit for those who come with it, e.g. disk=10GB (repeatable)."),
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(help="With --role program: only queues below this name (repeatable)."),
    ] = None,
    hub: HubOption = "",
) -> None:
    """Print a new ticket: by default for one use within two hours."""
    from atoll.hub.quotas.limits import parse_quotas

    quotas = parse_quotas(quota or ())
    roles = ("node", "viewer", "operator", "program")
    if role not in roles:
        from atoll.errors import unknown

        raise unknown("role", role, roles)
    with _client(hub) as client:
        made = client.create_ticket(
            role=role, uses=uses or None, valid_s=duration_s(valid) or None, name=name,
            quotas=quotas, queues=queues or (),
        )  # fmt: skip
    typer.echo(made)


@app.command()
def code(hub: HubOption = "") -> None:
    """Print a new pairing code: for one `atoll join` on this network, for ten minutes."""
    with _client(hub) as client:
        shown = client.pairing(renew=True)
    typer.echo(shown["code"])


@app.command(name="list")
def list_(hub: HubOption = "") -> None:
    """Show every ticket: id, role, uses left, expiry, creator and users; never the secret."""
    from rich.markup import escape
    from rich.table import Table

    from atoll.cli.views import screen

    with _client(hub) as client:
        tickets = client.tickets()
    table = Table(box=None, pad_edge=False)
    headings = ("id", "role", "state", "uses left", "ends", "for", "made by", "used by", "limits")
    for heading in headings:
        table.add_column(heading)
    for found in tickets:
        uses = "any" if found["uses_left"] is None else str(found["uses_left"])
        ends = "never" if found["expires"] is None else screen.moment(found["expires"])
        used = found["used_by"]
        shown = ", ".join(used[:5]) + (f" and {len(used) - 5} more" if len(used) > 5 else "")
        table.add_row(
            found["id"], found["role"], found["state"], uses, ends, escape(found["name"]),
            escape(found["made_by"]), escape(shown),
            " ".join(
                [f"{name}={limit}" for name, limit in found["quotas"].items()]
                + [f"{name}/..." for name in found["queues"]]
            ),
        )  # fmt: skip
    screen.output().print(table)


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(help="Id of the ticket, as `atoll ticket list` shows it.")],
    hub: HubOption = "",
) -> None:
    """Revoke a ticket and the logins made with it. Nodes stay: see `atoll node revoke`."""
    from atoll.cli.views import screen

    with _client(hub) as client:
        people = client.revoke_ticket(id)
    ended = f"; ended the logins {', '.join(people)}" if people else ""
    screen.output().print(f"ticket {id} is revoked{ended}", markup=False)


def duration_s(text: str) -> float:
    """Return the seconds of a duration like `90s`, `30m`, `2h` or `7d`.

    Raises:
        ConfigError: it is not a duration.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smhdw]?)", text.strip().lower())
    if match is None:
        raise ConfigError(
            "invalid duration", given=repr(text), expected="e.g. 90s, 30m, 2h, 7d, or 0"
        )
    return float(match[1]) * _UNITS[match[2] or "s"]


def _client(hub: str) -> HubClient:
    from atoll.cli import hub_access

    return hub_access.find(hub).client()
