"""`atoll policy`: what the owner of this machine allows, and whether work is paused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def policy(
    file: Annotated[
        Path | None, typer.Option("--policy", help="The policy (default: node.toml in the home).")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Folder of this node (default: Atoll's own).")
    ] = None,
) -> None:
    """Show this machine's current policy, and whether it takes work now, and why."""
    import datetime

    from rich.markup import escape

    from atoll import config
    from atoll.cli.views import screen
    from atoll.node.availability.policy import FILE, OwnerPolicyFile, describe_policy
    from atoll.node.availability.rule import decide
    from atoll.node.availability.sensors import Sensors
    from atoll.node.launchers.sandbox import level

    path = file or (home or config.home()) / FILE
    found = OwnerPolicyFile(path, needed=file is not None).read()
    console = screen.output()
    where = screen.shown(path) if path.exists() else f"no {screen.shown(path)}: nothing is limited"
    console.print(f"policy    {escape(where)}", soft_wrap=True)
    for line in describe_policy(found) or ["all of this machine, all kinds of job, at any time"]:
        console.print(f"          {escape(line)}", soft_wrap=True)
    if found.sandbox == "on":
        console.print(f"sandbox   {escape(level(found.network))}", soft_wrap=True)
    reading = Sensors().read_all()
    for line in _known(reading):
        console.print(f"machine   {escape(line)}", soft_wrap=True)
    pause = decide(found, reading, datetime.datetime.now())
    now = f"[yellow]paused: {escape(pause.text)}[/]" if pause.text else "[green]takes work[/]"
    console.print(f"now       {now}", soft_wrap=True)


def _known(reading: object) -> list[str]:
    """Return the sensors' readings, in words."""
    from atoll.node.availability.reading import Reading

    assert isinstance(reading, Reading)
    lines = []
    if reading.on_battery is not None:
        charge = "" if reading.battery_percent is None else f", {reading.battery_percent:.0f} %"
        lines.append(("on battery" if reading.on_battery else "on mains") + charge)
    if reading.metered is not None:
        lines.append("on a metered network" if reading.metered else "on a network without a meter")
    if reading.idle_s is not None:
        lines.append(f"last input {reading.idle_s / 60:.0f} minutes ago")
    if reading.lid_closed is not None:
        lines.append("the lid is closed" if reading.lid_closed else "the lid is open")
    return lines or ["no battery, lid, metered network or user input detected"]
