"""`atoll up`: a hub, this machine as its first node, and the page in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
