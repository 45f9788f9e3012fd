"""`atoll simulate`: thousands of members on virtual time, and what breaks first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.simulate.record import Outcome
    from atoll.simulate.setting import Setting


def simulate(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="A file of machines.")],
    members: Annotated[
        int, typer.Option(min=0, max=100_000, help="Members, in the file's proportions.")
    ] = 0,
    hours: Annotated[float, typer.Option(min=0.01, help="Simulated hours.")] = 24.0,
    every: Annotated[int, typer.Option(min=1, help="Optimizer steps between two rounds.")] = 500,
    exchange: Annotated[
        str, typer.Option(help="Bytes that a member sends in a round, e.g. 100MB.")
    ] = "100MB",
    state: Annotated[
        str, typer.Option(help="Bytes that a newcomer takes over (default: 4 x --exchange).")
    ] = "",
    quorum: Annotated[
        float, typer.Option(min=0, max=1, help="Share of members that a round waits for; 0: all.")
    ] = 0.0,
    route: Annotated[str, typer.Option(help="auto, direct or relay.")] = "auto",
    jitter: Annotated[
        float, typer.Option(min=0, max=0.99, help="Deviation of a period's compute, as a share.")
    ] = 0.05,
    repair: Annotated[
        float, typer.Option(min=0, help="Mean seconds until a failed machine is back.")
    ] = 600.0,
    trace: Annotated[
        Path | None, typer.Option(help="CSV member,from_s,to_s: who was there when.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal outcomes.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Simulate a job on a fleet: the real round machine, on virtual machines, links and time.

    Prints goodput, what time was lost to, bytes, the hub's load, a timeline, and what breaks first
    at 100, 1,000 and 10,000 members. Nothing is trained: tensors are sizes.

    Examples:
        atoll simulate fleet.toml
        atoll simulate fleet.toml --members 10000 --quorum 0.9
        atoll simulate fleet.toml --trace who.csv --hours 6 --json
    """
    import json

    from atoll.cli.views import screen
    from atoll.config.sizes import parse_size
    from atoll.errors import unknown
    from atoll.fleet.reading import read_fleet
    from atoll.simulate.limits import SIZES, verdict
    from atoll.simulate.presence import read_trace
    from atoll.simulate.setting import HOUR_S, Setting, scaled

    if route not in ("auto", "direct", "relay"):
        raise unknown("route", route, ("auto", "direct", "relay"))
    machines = read_fleet(fleet)
    count = members or len(machines)
    setting = Setting(
        fleet=scaled(machines, count), every=every, exchange_bytes=parse_size(exchange),
        state_bytes=parse_size(state) if state else 0.0, duration_s=hours * HOUR_S, seed=seed,
        route=route, quorum=quorum, jitter=jitter, repair_s=repair,
        trace=read_trace(trace, members=count) if trace else (),
    )  # fmt: skip
    outcome = _run(setting)
    words = verdict(setting, sorted({*SIZES, count}))
    if json_:
        typer.echo(json.dumps({**outcome.figures(), "breaks": words}, indent=1))
        return
    from atoll.cli.views.simulation import page

    for line in page(outcome, words):
        screen.output().print(line, markup=False, soft_wrap=True, highlight=False)


def _run(setting: Setting) -> Outcome:
    """Simulate with a bar of progress on a terminal; an interrupt ends it."""
    from atoll.cli.views import screen
    from atoll.simulate.world import World

    console = screen.errors()
    if not console.is_terminal:
        return World(setting).run()
    with console.status("simulating") as status:
        return World(setting).run(lambda share: status.update(f"simulating: {share:.0%}"))
