"""`atoll simulate`: thousands of members on virtual time, and what breaks first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atoll.config import JobSpec
    from atoll.simulate.record import Outcome
    from atoll.simulate.setting import Setting


def simulate(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="A file of machines.")],
    job: Annotated[
        Path | None,
        typer.Option(help="A job file: rounds, bytes, state, places and steps are its own."),
    ] = None,
    members: Annotated[
        int, typer.Option(min=0, max=100_000, help="Members wanted (default: the job's, or one "
                          "on each machine).")
    ] = 0,
    machines: Annotated[
        int, typer.Option(min=0, max=100_000, help="Machines, in the file's proportions (default: "
                          "--members, or those of the file). More than members are spare.")
    ] = 0,
    min_members: Annotated[
        int | None, typer.Option(min=0, help="The job pauses with fewer (default: its own, or 1).")
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.01, help="Simulated hours; a job may be done before.")
    ] = 24.0,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps between two rounds (default: the job's, or 500).")
    ] = None,
    exchange: Annotated[
        str, typer.Option(help="Bytes that a member sends in a round (default: as the job's method "
                          "counts them, or 100MB).")
    ] = "",
    state: Annotated[
        str, typer.Option(help="Bytes that a newcomer takes over (default: the job's, or 4 x "
                          "--exchange).")
    ] = "",
    quorum: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of members that a round waits for; 0: all (default: "
                     "the job's, or 0).")
    ] = None,
    route: Annotated[
        str, typer.Option(help="auto, direct or relay (default: the job's, or auto).")
    ] = "",
    jitter: Annotated[
        float, typer.Option(min=0, max=0.99, help="Deviation of a period's compute, as a share.")
    ] = 0.05,
    repair: Annotated[
        float, typer.Option(min=0, help="Mean seconds until a failed machine is back.")
    ] = 600.0,
    trace: Annotated[
        Path | None, typer.Option(help="CSV member,from_s,to_s: when each machine was there.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Equal seeds give equal outcomes (default: the job's, or 0).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:  # fmt: skip
    """Simulate a job on a fleet: the hub's own rounds and placement, on virtual machines and time.

    Prints goodput, what time was lost to, bytes, the hub's load, a timeline, and what breaks first
    at 100, 1,000 and 10,000 members. Nothing is trained: tensors are sizes. Options that are given
    win over the job's.

    Examples:
        atoll simulate fleet.toml --job job.toml
        atoll simulate fleet.toml --job job.toml --machines 12 --min-members 4
        atoll simulate fleet.toml --members 10000 --quorum 0.9
        atoll simulate fleet.toml --trace who.csv --hours 6 --json
    """  # fmt: skip
    import json

    from atoll.cli.views import screen
    from atoll.config import load_spec
    from atoll.config.sizes import parse_size
    from atoll.errors import unknown
    from atoll.fleet.reading import read_fleet
    from atoll.simulate.limits import SIZES, verdict
    from atoll.simulate.presence import read_trace
    from atoll.simulate.setting import HOUR_S, Setting, scaled

    if route not in ("", "auto", "direct", "relay"):
        raise unknown("route", route, ("auto", "direct", "relay"))
    file = read_fleet(fleet)
    count = machines or members or len(file)
    there = scaled(file, count)
    fields: dict[str, Any] = {
        "duration_s": hours * HOUR_S, "jitter": jitter, "repair_s": repair,
        "trace": read_trace(trace, members=count) if trace else (),
    }  # fmt: skip
    fields |= {"exchange_bytes": parse_size(exchange)} if exchange else {}
    fields |= {"state_bytes": parse_size(state)} if state else {}
    typed: dict[str, Any] = {
        "nodes": members or None, "min_nodes": min_members, "quorum": quorum, "seed": seed,
        "route": route or None,
    }  # fmt: skip
    table = {name: value for name, value in typed.items() if value is not None}
    if job is None:
        setting = Setting(
            fleet=there, members=members, min_members=table.get("min_nodes", 1),
            every=every or 500, seed=seed or 0, quorum=quorum or 0.0, route=route or "auto",
            **fields,
        )  # fmt: skip
    else:
        setting = _of_job(load_spec(job), there, table, every=every or 0, fields=fields)
    outcome = _run(setting)
    words = verdict(setting, sorted({*SIZES, setting.wanted}))
    if json_:
        typer.echo(json.dumps({**outcome.figures(), "breaks": words}, indent=1))
        return
    from atoll.cli.views.simulation import page

    for line in page(outcome, words):
        screen.output().print(line, markup=False, soft_wrap=True, highlight=False)


def _of_job(
    spec: JobSpec, fleet: Any, table: dict[str, Any], *, every: int, fields: dict[str, Any]
) -> Setting:
    """Return the simulation of a job; options of the command replace the job's own values."""
    from atoll.simulate.job import setting_of

    spec = dataclasses.replace(spec, job=dataclasses.replace(spec.job, **table))
    if every:
        options = {**spec.strategy.options, "every": every}
        spec = dataclasses.replace(
            spec, strategy=dataclasses.replace(spec.strategy, options=options)
        )
    setting = setting_of(spec, fleet)
    if "exchange_bytes" in fields and setting.method is not None:
        fields["method"] = dataclasses.replace(setting.method, moved=None)
    return dataclasses.replace(setting, **fields)


def _run(setting: Setting) -> Outcome:
    """Simulate with a bar of progress on a terminal; an interrupt ends it."""
    from atoll.cli.views import screen
    from atoll.simulate.world import World

    console = screen.errors()
    if not console.is_terminal:
        return World(setting).run()
    with console.status("simulating") as status:
        return World(setting).run(lambda share: status.update(f"simulating: {share:.0%}"))
