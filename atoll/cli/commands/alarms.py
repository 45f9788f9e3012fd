"""`atoll alarms` and `atoll worth`: current problems, and what each machine contributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType


def alarms(
    all_: Annotated[bool, typer.Option("--all", help="Include alarms that have ended.")] = False,
    silence: Annotated[
        int | None, typer.Option(help="Number of an alarm to silence: no more messages are sent.")
    ] = None,
    unsilence: Annotated[int | None, typer.Option(help="Number of an alarm to unsilence.")] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show current problems: the machine, the cause, and what to do."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        for number, silenced in ((silence, True), (unsilence, False)):
            if number is not None:
                client.silence(number, silenced=silenced)
        rows = client.alarms(all_=all_)
    if json_:
        typer.echo(json.dumps(rows, indent=1))
    elif not rows:
        screen.output().print("[green]All clear[/]" if not all_ else "no alarms so far")
    else:
        screen.output().print(alarms_table(rows), soft_wrap=True)


def alarms_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of alarms, with cause and remedy below each other."""
    from rich.markup import escape
    from rich.text import Text

    from atoll.cli.views import screen

    lines: list[str] = []
    for row in rows:
        colour = {"critical": "red", "warning": "yellow"}[row["severity"]]
        state = f"ended {screen.moment(row['ended'])}" if row["ended"] else row["severity"]
        known = ", silenced" if row["silenced"] and not row["ended"] else ""
        colour = "dim" if row["ended"] or row["silenced"] else colour
        lines.append(
            f"[{colour}]{row['id']:>4}  {escape(row['kind'])}  {state}{known}[/]"
            f"  [dim]since {screen.moment(row['since'])}[/]"
        )
        lines.append(f"      {escape(row['cause'])}")
        if not row["ended"]:
            lines.append(f"      [dim]{escape(row['remedy'])}[/]")
    return Text.from_markup("\n".join(lines))


def worth(
    job: Annotated[str, typer.Argument(help="A job, or the beginning of its name.")],
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what each machine contributes to a job, and what one more would add."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.jobs.names import job_named
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        found = client.worth(job_named(client, job))
    if json_:
        typer.echo(json.dumps(found, indent=1))
    else:
        screen.output().print("\n".join(worth_lines(found)), soft_wrap=True, markup=False)


def worth_lines(found: Mapping[str, Any]) -> list[str]:
    """Return sentences about the group's speed: the whole, each machine, one more."""
    lines = [found["text"].partition(";")[0]]
    if found["tokens_per_s"] is not None:
        lines += [f"  {node['text']}" for node in found["nodes"]]
        lines.append(f"  {found['next']['text']}")
    return lines
