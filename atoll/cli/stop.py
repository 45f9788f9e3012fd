"""`atoll stop`: end a job at its next agreement, with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer


def stop(
    job: Annotated[str, typer.Argument(help="A job (default: the newest).")] = "",
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that its members get to finish their round.")
    ] = 60.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end.")] = True,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Stop a job; `atoll resume JOB` takes it up again."""
    import time

    from atoll.cli import known_hub, screen
    from atoll.cli.follow import say_ended
    from atoll.cli.watch import ENDED
    from atoll.errors import DeadlineExceeded

    console = screen.output()
    with known_hub.find(hub).client() as client:
        chosen = job or known_hub.newest_job(client)
        client.stop(chosen, grace_s=grace)
        if not wait:
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
