"""`atoll scale`: change a job's member bounds; `atoll stop`: end a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.net.http.client import HubClient


def scale(
    job: Annotated[str, typer.Argument(help="A job that waits or runs.")],
    bounds: Annotated[
        str, typer.Argument(help="MIN:MAX members, e.g. 2:8; or one number, as with --nodes.")
    ],
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Set the minimum and maximum number of members of a job, also while it runs."""
    from rich.markup import escape

    from atoll.cli import hub_access
    from atoll.cli.jobs.names import job_named
    from atoll.cli.views import screen

    least, most = read_bounds(bounds)
    with hub_access.find(hub).client() as client:
        job = job_named(client, job, live=True)
        client.scale(job, least=least, most=most)
    text = f"{job} has {least} to {most} members from now on" if least else f"{job}: {most} members"
    screen.output().print(escape(text), soft_wrap=True)


def read_bounds(text: str) -> tuple[int, int]:
    """Return the two numbers of ``MIN:MAX``; for a single number, 0 and that.

    Raises:
        ConfigError: it is neither.
    """
    from atoll.errors import ConfigError

    least, colon, most = text.partition(":")
    try:
        return (int(least), int(most)) if colon else (0, int(text))
    except ValueError:
        raise ConfigError(
            "these bounds cannot be read", given=repr(text), expected="MIN:MAX, e.g. 2:8"
        ) from None


def stop(
    job: Annotated[
        str, typer.Argument(help="A job, or the beginning of its name; without it you are asked.")
    ] = "",
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that its members get to finish their round.")
    ] = 60.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end.")] = True,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Stop a job; `atoll resume JOB` continues it."""
    import time

    from atoll.cli import hub_access
    from atoll.cli.jobs.follow import say_ended
    from atoll.cli.jobs.names import job_named
    from atoll.cli.views import screen
    from atoll.cli.views.job import ENDED
    from atoll.errors import DeadlineExceeded

    console = screen.output()
    with hub_access.find(hub).client() as client:
        chosen = job_named(client, job, live=True) if job else _confirmed(console, client)
        client.stop(chosen, grace_s=grace)
        if not wait and client.job(chosen)["state"] not in ENDED:  # a waiting one ends at once
            console.print(f"{chosen} stops at its next round, in {grace:.0f} s at the latest")
            return
        deadline = time.monotonic() + grace + 30.0
        with console.status(f"{chosen}: members finish their round, save and leave"):
            while (view := client.job(chosen))["state"] not in ENDED:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        "the job did not end in time",
                        given=chosen,
                        expected=f"an end within {grace + 30:.0f} s",
                        remedy=f"look at it: atoll status {chosen}; its nodes may be gone",
                    )
                time.sleep(0.3)
        say_ended(console, view)


def _confirmed(console: Console, client: HubClient) -> str:
    """Return the only job that has not ended, if a person confirms that it is meant."""
    import sys

    from atoll.cli.jobs.names import listed
    from atoll.errors import ConfigError
    from atoll.wire.states import JobState

    going = [
        str(view["job"]) for view in client.jobs(brief=True) if not JobState(view["state"]).ended
    ]
    if len(going) != 1 or not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigError(
            "no job is named" if going else "no job runs or waits",
            expected=f"the job to stop: {listed(going)}" if going else None,
            remedy=f"atoll stop {going[0]}" if going else "`atoll status` lists all jobs",
        )
    typer.confirm(f"Stop {going[0]}?", default=False, abort=True)
    return going[0]
