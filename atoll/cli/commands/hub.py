"""`atoll hub`: start the hub; `atoll hub backup`: copy it; `atoll up`: hub, node and page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.hub.server import HubServer

app = typer.Typer(invoke_without_command=True)


@app.callback()
def hub(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 7700,
    advertise: Annotated[
        str, typer.Option(help="HOST, HOST:PORT or URL in the ticket (default: detected).")
    ] = "",
    prefix: Annotated[
        str, typer.Option(help="Path below which a reverse proxy serves the hub, e.g. /atoll.")
    ] = "",
    announce: Annotated[
        bool | None,
        typer.Option(
            "--announce/--no-announce",
            help="Announce the hub on the local network (default: unless on 127.0.0.1).",
        ),
    ] = None,
    ticket_uses: Annotated[
        int | None, typer.Option(min=1, help="How many machines may use the ticket.")
    ] = None,
    ticket_file: Annotated[
        Path | None,
        typer.Option(help="Also write the ticket to this file, for nodes that start unattended."),
    ] = None,
    tls: Annotated[
        str,
        typer.Option(help="auto (TLS unless on 127.0.0.1), on, off, or CERTIFICATE:KEY files."),
    ] = "auto",
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Reverse proxy that is trusted to set X-Forwarded-For (repeatable)."),
    ] = None,
    queue: Annotated[
        str,
        typer.Option(
            help="Store users' queues there: nats://HOST:PORT/NAMESPACE, or @FILE with it."
        ),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Folder of the hub's database (default: Atoll's own).")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the jobs' files.")] = Path("runs"),
    copies: Annotated[
        list[Path] | None,
        typer.Option(help="Folder into which jobs may copy checkpoints (repeatable)."),
    ] = None,
    keep_ended: Annotated[
        str, typer.Option(help="Delete jobs so long after their end, e.g. 30d (default: never).")
    ] = "",
    keep_resumable: Annotated[
        str,
        typer.Option(help="The same for jobs that could still be resumed (default: never)."),
    ] = "",
    hooks: Annotated[
        Path | None,
        typer.Option(help="File of alarm hooks (default: hooks.toml in the data folder)."),
    ] = None,
    quotas: Annotated[
        Path | None,
        typer.Option(help="File of limits (default: quotas.toml in the data folder)."),
    ] = None,
    otlp: Annotated[
        str,
        typer.Option(help="OpenTelemetry collector for metrics, e.g. http://HOST:4318."),
    ] = "",
    backup: Annotated[
        Path | None,
        typer.Option("--from", help="Restore this backup if the data folder is empty."),
    ] = None,
) -> None:
    """Start the hub in the foreground; prints the join ticket for the other machines."""
    if context.invoked_subcommand is not None:
        return
    import signal

    from atoll import config
    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.hub.app import HubOptions
    from atoll.hub.jobs.retention import RetentionRules
    from atoll.hub.options import apply_tuning
    from atoll.hub.quotas.limits import read_quotas
    from atoll.hub.server import HubServer, run
    from atoll.node.identity.identity import write_secret

    apply_tuning()
    console = screen.output()
    server = HubServer(
        HubOptions(
            data=(data or config.home() / "hub").resolve(),
            jobs=runs.resolve(),
            host=host,
            port=port,
            advertise=advertise,
            prefix=prefix,
            announce=announce,
            ticket_uses=ticket_uses,
            queue=queue,
            tls=tls,
            trust_proxy=tuple(trust_proxy or ()),
            copies=tuple(folder.resolve() for folder in copies or ()),
            keeping=RetentionRules(ended=_days(keep_ended), resumable=_days(keep_resumable)),
            hooks=hooks.resolve() if hooks else None,
            quotas=read_quotas(quotas, needed=True) if quotas else None,
            otlp=otlp,
            restore_from=backup.resolve() if backup else None,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())

    def ready() -> None:
        hub_access.remember(
            hub_access.KnownHub(server.url, server.operator_token, operator=True, ca=server.ca)
        )
        if ticket_file is not None:
            write_secret(ticket_file, server.ticket + "\n")
        show_ready(console, server)

    run(server, on_ready=ready)
    console.print("the hub has stopped")


def show_ready(console: Console, server: HubServer) -> None:
    """Print the dashboard's address, and what to type on other machines and here."""
    from rich.markup import escape  # an IPv6 host in brackets would be taken for a style

    console.print("[bold green]the hub is ready[/]")
    if server.is_exposed:
        console.print(
            "  [bold red]without TLS[/]: anyone on the network in between can read tokens, "
            "code and data; use --tls off only behind a proxy with TLS",
            soft_wrap=True,
        )
    dashboard = escape(f"{server.url}/?token={server.operator_token}")
    console.print(f"  dashboard   {dashboard}", soft_wrap=True)
    if server.ca and not server.ticket.endswith("~tls"):
        console.print("  a browser warns about this hub's certificate; its authority is in")
        console.print(f"              {server.ca}", soft_wrap=True, markup=False)
    console.print("  on every other machine, type:", style="dim")
    console.print(f"    [bold]atoll join {escape(server.ticket)}[/]", soft_wrap=True)
    console.print("  then, here:", style="dim")
    console.print("    [bold]atoll run demo[/]")
    console.print("  Ctrl+C stops the hub; its jobs continue when it is started again", style="dim")


def _days(text: str) -> float | None:
    """Return the days that a text means; a bare number is days, an empty text means forever."""
    from atoll.cli.access.ticket import duration_s

    return duration_s(f"{text}d" if text.isdigit() else text) / 86_400 if text else None


@app.command("backup")
def backup(
    folder: Annotated[Path, typer.Argument(help="Folder for backups; each one is a subfolder.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the hub's database (default: Atoll's own).")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of the jobs (default: the hub's own).")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Delete all but this many afterwards.")
    ] = None,
) -> None:
    """Copy the hub while it runs: its database, its secrets and the folders of its jobs.

    `atoll hub --from FOLDER` starts a hub from the newest copy. Keep it private: it holds secrets.
    """
    from rich.markup import escape

    from atoll import config
    from atoll.cli.views import screen
    from atoll.clock import RealClock
    from atoll.hub.storage.backup import take

    console = screen.output()
    place = (data or config.home() / "hub").resolve()
    result = take(
        folder.resolve(),
        data=place,
        clock=RealClock(),
        jobs=runs.resolve() if runs else None,
        keep=keep,
    )
    for line in result.left_out:
        console.print(f"[yellow]left out[/] {escape(line)}", soft_wrap=True)
    count = len(result.listing.files)
    size = screen.size(result.nbytes)
    console.print(f"{result.path} ({count} files, {size})", soft_wrap=True, markup=False)


def up(
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 7700,
    advertise: Annotated[
        str, typer.Option(help="HOST, HOST:PORT or URL in the ticket (default: detected).")
    ] = "",
    runs: Annotated[
        Path | None, typer.Option(help="Folder of the jobs' files (default: the last one, ./runs).")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Start hub, node and page on this machine, and show how others join; Ctrl+C stops all.

    A later `atoll up` goes on with the same cluster.
    """
    from atoll.cli.jobs.up import UpOptions
    from atoll.cli.jobs.up import up as run_up
    from atoll.cli.views import screen

    options = UpOptions(port=port, advertise=advertise, runs=runs, browser=browser)
    raise typer.Exit(run_up(options, console=screen.output()))
