"""`atoll doctor`: check whether this machine is ready, with remedies."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    port: Annotated[int, typer.Option(help="Port that a hub would listen on.")] = 7700,
) -> None:
    """Check Python, torch, port, disk, sandbox, the hub, clock, bandwidth and speed."""
    from rich.markup import escape

    from atoll import config
    from atoll.cli.checks import run_checks
    from atoll.cli.views import screen

    marks = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[yellow]note[/]"}
    console = screen.output()
    broken = 0
    for check in run_checks(hub, home=config.home(), port=port):
        remedy = "" if check.passed or not check.remedy else f"  [dim]->[/] {escape(check.remedy)}"
        console.print(
            f"{marks[check.passed]}  {check.name:<9} {escape(check.text)}{remedy}", soft_wrap=True
        )
        broken += check.passed is False and check.needed
    if broken:
        raise typer.Exit(1)
