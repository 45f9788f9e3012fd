"""`atoll secret`: keys of services that jobs use, kept by the hub; `set`, `list`, `rm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.net.http.client import HubClient

app = typer.Typer(no_args_is_help=True)

HubOption = Annotated[str, typer.Option(help="URL of the hub (default: the last).")]
NameArgument = Annotated[str, typer.Argument(help="Name, e.g. HF_TOKEN.")]


@app.callback()
def secret() -> None:
    """Keys of services that jobs use: kept encrypted by the hub, hidden in logs and views."""


@app.command(name="set")
def set_(
    name: NameArgument,
    file: Annotated[
        Path | None, typer.Option(help="Read the value from a file; - is standard input.")
    ] = None,
    hub: HubOption = "",
) -> None:
    """Store a secret, or replace it; the value is asked for. Jobs name it in `secrets`."""
    value = _read(name, file)
    with _client(hub) as client:
        client.set_secret(name, value)
    typer.echo(f'{name} is stored; a job gets it with secrets = ["{name}"] in [launch]')


@app.command(name="list")
def list_(hub: HubOption = "") -> None:
    """Show name, last change and who made it; never a value."""
    from rich.table import Table

    from atoll.cli.views import screen

    with _client(hub) as client:
        known = client.secrets()
    if not known:
        typer.echo("no secrets; `atoll secret set NAME` stores one")
        return
    table = Table("name", "changed", "by", box=None, pad_edge=False)
    for row in known:
        table.add_row(
            row["name"], screen.moment(row["changed"]), screen.harmless(row["changed_by"])
        )
    screen.output().print(table)


@app.command()
def rm(name: NameArgument, hub: HubOption = "") -> None:
    """Delete a secret. Processes that have it keep it until they end."""
    with _client(hub) as client:
        client.remove_secret(name)
    typer.echo(f"{name} is deleted")


def _read(name: str, file: Path | None) -> str:
    """Return the value: of a file, of standard input, or typed without being shown."""
    import sys

    from atoll.errors import ConfigError

    if file is not None and str(file) != "-":
        try:
            return file.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("the value cannot be read", given=f"{file}: {error}") from error
    if file is not None or not sys.stdin.isatty():
        return sys.stdin.read().rstrip("\r\n")
    return str(typer.prompt(f"value of {name}", hide_input=True))


def _client(hub: str) -> HubClient:
    from atoll.cli import hub_access

    return hub_access.find(hub).client()
