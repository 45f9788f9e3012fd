"""`atoll logs`: what the processes of a job printed."""

from __future__ import annotations

from typing import Annotated

import typer


def logs(
    job: Annotated[
        str, typer.Argument(help="A job (default: the newest), or the folder of a local run.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
    member: Annotated[str, typer.Option(help="One member only, e.g. w2.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines; 0: all.")] = 200,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Print the lines of a job's processes, each with its member."""
    from pathlib import Path

    from atoll.cli import known_hub, screen
    from atoll.cli.embedded import output_of, recall_embedded
    from atoll.cli.watch import ENDED

    console = screen.output()
    local = recall_embedded(Path(job)) if job and not hub else None
    if local is not None:  # its hub may be gone; what its processes printed is still here
        printed = output_of(local[0], job=Path(job).resolve().name, member=member)
        for line in printed[-lines:] if lines else printed:
            screen.log_line(console, line)
        return
    with known_hub.find(hub).client(timeout_s=60.0) as client:
        chosen = job or known_hub.newest_job(client)
        after, shown = 0, []
        while True:
            answer = client.logs(chosen, after=after, member=member)
            after = int(answer["last"])
            shown += answer["lines"]
            if not answer["lines"]:
                break
        for line in shown[-lines:] if lines else shown:
            screen.log_line(console, line)
        while follow:
            ended = client.job(chosen)["state"] in ENDED
            answer = client.logs(chosen, after=after, member=member, wait_s=0.0 if ended else 10.0)
            after = int(answer["last"])
            for line in answer["lines"]:
                screen.log_line(console, line)
            if ended and not answer["lines"]:
                return
