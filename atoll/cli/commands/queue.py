"""`atoll queue`: show queues, put items into them, and handle dead letters."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(
    name="queue", help="Look at queues and topics, and deal with dead letters.",
    no_args_is_help=True,
)  # fmt: skip

Name = Annotated[str, typer.Argument(help="Name of the queue, as shown by `atoll queue list`.")]
Seq = Annotated[int | None, typer.Argument(help="Number of a dead letter (see `dead`).")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]
Hub = Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@app.command("list")
def list_(hub: Hub = "", json_: Json = False) -> None:
    """Show every queue and topic: how full, how old, how fast."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.cli.views.queues import queues_table

    with hub_access.find(hub).client() as client:
        rows = client.queues()
    if json_:
        typer.echo(json.dumps(rows, indent=1))
        return
    screen.output().print(queues_table(rows))


@app.command()
def show(queue: Name, hub: Hub = "", json_: Json = False) -> None:
    """Show one queue or topic with its limits."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.cli.views.queues import queue_table
    from atoll.errors import unknown

    with hub_access.find(hub).client() as client:
        rows = {row["queue"]: row for row in client.queues()}
    if queue not in rows:
        raise unknown("queue", queue, rows)
    if json_:
        typer.echo(json.dumps(rows[queue], indent=1))
        return
    screen.output().print(queue_table(rows[queue]))


@app.command()
def put(
    queue: Name,
    value: Annotated[str, typer.Argument(help="What to put; `-` reads standard input.")],
    key: Annotated[
        str, typer.Option(help="Idempotency key: items with the same key are stored once.")
    ] = "",
    text: Annotated[
        bool, typer.Option("--text", help="Store the value as bytes instead of JSON.")
    ] = False,
    hub: Hub = "",
) -> None:
    """Put a value: JSON if it parses as JSON, else text."""
    import sys

    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.ids import new_token

    content = sys.stdin.read() if value == "-" else value
    with hub_access.find(hub).client() as client:
        done = client.queue_put(queue, key=key or new_token(), payload=_payload(content, text=text))
    outcome = "was there already as" if done.duplicate else "is"
    screen.output().print(f"it {outcome} number {done.seq} of {queue}")


def _payload(content: str, *, text: bool) -> bytes:
    import json

    from atoll.queues import serialization

    if not text:
        try:
            return b"".join(serialization.encode(json.loads(content)))
        except json.JSONDecodeError:
            pass
    return b"".join(serialization.encode(content.encode()))


@app.command()
def dead(queue: Name, hub: Hub = "", json_: Json = False) -> None:
    """Show items that were released too often, oldest first."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.views import screen
    from atoll.cli.views.queues import letters_table

    with hub_access.find(hub).client() as client:
        letters = client.dead_letters(queue)
    if json_:
        typer.echo(json.dumps(letters, indent=1))
        return
    screen.output().print(letters_table(letters))


@app.command()
def requeue(queue: Name, seq: Seq = None, all_: All = False, hub: Hub = "") -> None:
    """Make a dead letter ready again, with a fresh count of attempts."""
    _settle("requeue", "are ready again", queue, _which(seq, all_=all_), hub)


@app.command()
def discard(queue: Name, seq: Seq = None, all_: All = False, hub: Hub = "") -> None:
    """Delete a dead letter for good."""
    _settle("discard", "are gone", queue, _which(seq, all_=all_), hub)


def _which(seq: int | None, *, all_: bool) -> int | None:
    from atoll.errors import ConfigError

    if (seq is None) != all_:
        raise ConfigError(
            "no dead letter is selected",
            expected="the number of one, or --all",
            remedy="`atoll queue dead QUEUE` shows them",
        )
    return seq


def _settle(verb: str, outcome: str, queue: str, seq: int | None, hub: str) -> None:
    from atoll.cli import hub_access
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        call: Any = getattr(client, verb)
        count = call(queue, seq=seq)
    screen.output().print(
        f"{count} of {queue} {outcome}" if count else "there is no such dead letter"
    )
