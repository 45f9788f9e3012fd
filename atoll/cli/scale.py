"""`atoll scale`: other bounds for the members of a job, while it runs."""

from __future__ import annotations

from typing import Annotated

import typer


def scale(
    job: Annotated[str, typer.Argument(help="A job that waits or runs.")],
    bounds: Annotated[
        str, typer.Argument(help="MIN:MAX members, e.g. 2:8; or one number, as with --nodes.")
    ],
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Let a job have fewer or more members from now on."""
    from rich.markup import escape

    from atoll.cli import known_hub, screen

    least, most = read_bounds(bounds)
    with known_hub.find(hub).client() as client:
        client.scale(job, least=least, most=most)
    text = f"{job} has {least} to {most} members from now on" if least else f"{job}: {most} members"
    screen.output().print(escape(text), soft_wrap=True)


def read_bounds(text: str) -> tuple[int, int]:
    """Return the two numbers of ``MIN:MAX``; of one number alone, 0 and that.

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
