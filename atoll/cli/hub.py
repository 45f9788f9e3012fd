"""`atoll hub`: the meeting point of the machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def hub(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 7700,
    advertise: Annotated[
        str, typer.Option(help="Name or address in the ticket (default: found out).")
    ] = "",
    ticket_uses: Annotated[
        int | None, typer.Option(min=1, help="How many machines may use the ticket.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the hub's database (default: Atoll's own).")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder where jobs leave their files.")] = Path("runs"),
) -> None:
    """Start the hub in the foreground; prints the join ticket for the other machines."""
    import signal

    from atoll import config
    from atoll.cli import known_hub, screen
    from atoll.hub.app import HubOptions
    from atoll.hub.server import HubServer, run

    console = screen.output()
    server = HubServer(
        HubOptions(
            data=(data or config.home() / "hub").resolve(),
            jobs=runs.resolve(),
            host=host,
            port=port,
            advertise=advertise,
            ticket_uses=ticket_uses,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())

    def ready() -> None:
        known_hub.remember(known_hub.KnownHub(server.url, server.operator_token, operator=True))
        console.print("[bold green]the hub is ready[/]")
        console.print(f"  dashboard   {server.url}/?token={server.operator_token}", soft_wrap=True)
        console.print("  on every other machine, type:", style="dim")
        console.print(f"    [bold]atoll join {server.ticket}[/]", soft_wrap=True)
        console.print("  then, here or on any of them:", style="dim")
        console.print("    [bold]atoll run examples/gpt.toml[/]")
        console.print(
            "  Ctrl+C stops the hub; it takes up its jobs when it comes back", style="dim"
        )

    run(server, on_ready=ready)
    console.print("the hub has stopped")
