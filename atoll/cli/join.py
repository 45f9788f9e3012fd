"""`atoll join`: this machine offers itself to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def join(
    ticket: Annotated[str, typer.Argument(help="The ticket that `atoll hub` printed.")],
    slots: Annotated[int, typer.Option(min=1, help="How many workers it takes at once.")] = 1,
    name: Annotated[str, typer.Option(help="Name of this machine (default: its own).")] = "",
    home: Annotated[
        Path | None, typer.Option(help="Folder of this node (default: Atoll's own).")
    ] = None,
    preempt_file: Annotated[
        Path | None,
        typer.Option(help="Give work back and take none while this file exists."),
    ] = None,
    preempt_url: Annotated[
        str,
        typer.Option(help="The same while this address answers 200 (a cloud's spot notice)."),
    ] = "",
) -> None:
    """Join a hub and serve it in the foreground until Ctrl+C.

    SIGTERM and a preemption notice let workers finish or abandon their round within 5 seconds.
    """
    from atoll import config
    from atoll.cli import known_hub, screen
    from atoll.cli.node_line import NodeLine
    from atoll.cli.precheck import check_can_train
    from atoll.net.ticket import parse_ticket
    from atoll.node.identity import Identity
    from atoll.node.options import NodeOptions
    from atoll.node.preempt import Notices, check_url
    from atoll.node.serve import run_node

    place = parse_ticket(ticket)
    check_url(preempt_url)
    check_can_train()
    folder = home or config.home()
    console = screen.output()
    line = NodeLine(console, hub=place.url)

    def ready(me: Identity) -> None:
        known_hub.remember(known_hub.KnownHub(me.hub, me.token))
        line.ready(me.node)

    options = NodeOptions(
        ticket=place,
        home=folder.resolve(),
        name=name,
        slots=slots,
        notices=Notices(preempt_file, check_url(preempt_url)),
    )
    with line:
        run_node(options, on_ready=ready, on_status=line.show)
    console.print("left the hub; nothing is running here any more")
