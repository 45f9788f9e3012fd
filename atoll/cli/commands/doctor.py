"""`atoll doctor`: check whether this machine is ready, with remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    port: Annotated[int, typer.Option(help="Port that a hub would listen on.")] = 7700,
    job: Annotated[
        Path | None, typer.Option(help="A job file: also print the lines to paste into it.")
    ] = None,
) -> None:
    """Check Python, torch, port, disk, sandbox, the hub, clock, lines and speed.

    It measures what `atoll plan` needs of this machine, says what is missing of the others, and
    names the weakest hop of all.
    """
    from rich.markup import escape

    from atoll import config
    from atoll.cli.checks import run_checks
    from atoll.cli.views import screen

    marks = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[yellow]note[/]"}
    console = screen.output()
    broken, planned = 0, False
    for check in run_checks(hub, home=config.home(), port=port):
        remedy = "" if check.passed or not check.remedy else f"  [dim]->[/] {escape(check.remedy)}"
        console.print(
            f"{marks[check.passed]}  {check.name:<9} {escape(check.text)}{remedy}", soft_wrap=True
        )
        broken += check.passed is False and check.needed
        planned = planned or check.name == "lines"
    if job is not None and not broken:
        from atoll.cli.planning.job_plan import Question, lines_to_paste

        lines = list(lines_to_paste(Question(job=job, hub=hub)))
        console.print("\nfor these machines (atoll plan says why):")
        for line in lines:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    elif planned and not broken:
        console.print("\nwhat to write into a job file: atoll doctor --job job.toml")
    if broken:
        raise typer.Exit(1)
