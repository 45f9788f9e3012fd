"""`atoll status`: machines and jobs, or one job in detail; `atoll watch`: a job live."""

from __future__ import annotations

from typing import Annotated

import typer


def status(
    job: Annotated[
        str, typer.Argument(help="A job, or the beginning of its name (default: all).")
    ] = "",
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show the nodes and jobs of the hub, or one job in detail."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.commands.alarms import worth_lines
    from atoll.cli.jobs.names import job_named
    from atoll.cli.views import screen
    from atoll.cli.views.tables import failures, job_table, jobs_table, nodes_table, remarks
    from atoll.wire.states import JobState

    where = hub_access.find(hub)
    console = screen.output()
    with where.client() as client:
        if job:
            job = job_named(client, job)
            view, worth = client.job(job), client.worth(job)
            if json_:
                typer.echo(json.dumps({**view, "worth": worth}, indent=1))
                return
            console.print(job_table(view))
            if view["state"] == JobState.FAILED:
                lines = len(view.get("last_lines") or [])
                console.print(failures([view], lines=lines), soft_wrap=True)
            if view["committed_round"]:
                console.print("\n".join(worth_lines(worth)), soft_wrap=True, markup=False)
            return
        nodes, jobs = client.nodes(), client.jobs()
    if json_:
        typer.echo(json.dumps({"hub": where.url, "nodes": nodes, "jobs": jobs}, indent=1))
        return
    console.print(f"hub {where.url}", style="dim", markup=False)
    console.print(nodes_table(nodes, width=console.width))
    console.print(jobs_table(jobs, width=console.width))
    console.print(remarks(jobs), soft_wrap=True)


def watch(
    job: Annotated[
        str,
        typer.Argument(
            help="A job, or the beginning of its name (default: the newest that runs or waits)."
        ),
    ] = "",
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Show a job live until it ends; Ctrl+C leaves it running."""
    from atoll.cli import hub_access
    from atoll.cli.jobs.names import job_named
    from atoll.cli.jobs.remote import watch_remote
    from atoll.cli.views import screen

    where, console = hub_access.find(hub), screen.output()
    with where.client() as client:
        chosen = job_named(client, job, live=True)
    raise typer.Exit(watch_remote(where, chosen, console=console))
