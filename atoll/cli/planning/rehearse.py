"""`atoll rehearse`: run a job here as on the machines of a file, and compare with predictions."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.config import JobSpec
    from atoll.fleet.fleet import Fleet
    from atoll.forecast.predict import Forecast
    from atoll.forecast.workload import Workload
    from atoll.rehearse.compare import Report
    from atoll.rehearse.curve import Curve
    from atoll.rehearse.rehearsal import Rehearsal

PROBE_S = 2.0
"""Seconds for which a step is measured on this machine."""


def rehearse(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A job file.")],
    machines: Annotated[
        Path, typer.Option("--machines", help="File of machines, links and faults.")
    ],
    minutes: Annotated[
        float, typer.Option(min=0.1, help="How long it may take here, about.")
    ] = 3.0,
    steps: Annotated[int, typer.Option(min=0, help="Until so many steps; 0: as many as fit.")] = 0,
    slower: Annotated[
        float, typer.Option(min=0, help="How many times slower than there; 0: as much as needed.")
    ] = 0.0,
    plan_: Annotated[
        str, typer.Option("--plan", help="auto: the method of the planner's first choice.")
    ] = "",
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Start no processes: virtual time.")
    ] = False,
    law: Annotated[
        Path | None, typer.Option(help="scaling.json of `atoll scaling fit`: predicts losses.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE in the job; repeatable.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which logs and the hub's files are kept.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Run the first minutes of a job here as it would run on other machines, and compare.

    Starts a real hub, agents and members in network namespaces: lines have the rates and round
    trips of the file, steps last as long as there, and its faults happen on time. Prints steps,
    rounds, bytes and loss as predicted and as seen. Needs Linux and root; elsewhere the round
    machine is simulated instead, which is said. Ctrl+C ends and removes everything.

    Examples:
        sudo atoll rehearse job.toml --machines fleet.toml
        atoll rehearse job.toml --machines fleet.toml --simulate
    """
    import json

    from atoll.cli.views import screen
    from atoll.cli.views.rehearsal import page
    from atoll.fleet.reading import read_fleet
    from atoll.forecast.keys import is_open

    fleet = read_fleet(machines)
    spec = _read(job, settings or ())
    if is_open(spec, plan=plan_):
        spec = _answered(spec, fleet, plan=plan_)
    options = RehearsalOptions(
        seconds=60 * minutes, steps=steps, slower=slower, simulated=simulated, law=law, keep=keep
    )
    report = rehearsed(spec, fleet, options)
    if json_:
        typer.echo(json.dumps(report.figures(), indent=1))
    else:
        for line in page(report):
            screen.output().print(line, markup=False, soft_wrap=True, highlight=False)
    if not report.finished:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """Options besides the job and the machines."""

    seconds: float
    steps: int = 0
    slower: float = 0.0
    simulated: bool = False
    law: Path | None = None
    keep: Path | None = None


def rehearsed(spec: JobSpec, fleet: Fleet, options: RehearsalOptions) -> Report:
    """Rehearse a job without keys that are `auto`.

    Raises:
        ConfigError: job or machines cannot be rehearsed here.
        JobError: the job failed.
        KeyboardInterrupt: Ctrl+C, after everything is removed.
    """
    from atoll.cli.views import screen
    from atoll.forecast.probe import measure_step
    from atoll.forecast.workload import workload_of
    from atoll.node.machine.probe import usable_cores
    from atoll.rehearse.compare import Report
    from atoll.rehearse.expected import expected
    from atoll.rehearse.rehearsal import Here, prepare

    console = screen.errors()
    why_not = "" if options.simulated else unavailable()
    real = not (options.simulated or why_not)
    if why_not:
        console.print(f"[yellow]no rehearsal with processes here: {why_not}; simulated[/]")
    load = workload_of(spec)
    here = Here(measure_step(spec, seconds=PROBE_S) if real else 0.0, usable_cores())
    plan, forecast = prepare(
        spec, fleet, load, here=here, seconds=options.seconds, steps=options.steps,
        slower=options.slower if real else 1.0,
    )  # fmt: skip
    predicted = with_losses(expected(plan, load), options.law, load, forecast, slower=plan.slower)
    seen, events = _seen(plan, forecast, predicted, options, elements=load.elements, real=real)
    return Report(
        job=spec.job.name, machines=len(fleet), steps=plan.steps, slower=plan.slower, real=real,
        predicted=predicted.scaled(1 / plan.slower), seen=seen.scaled(1 / plan.slower),
        events=tuple((seconds / plan.slower, text) for seconds, text in events),
        notes=tuple(_notes(plan, fleet, options, why_not=why_not)),
    )  # fmt: skip


def unavailable() -> str:
    """Return why this machine cannot make network namespaces; empty: it can."""
    from atoll.netlab.lab import Lab

    return Lab.unavailable() or ""


def _seen(
    plan: Rehearsal,
    forecast: Forecast,
    predicted: Curve,
    options: RehearsalOptions,
    *,
    elements: int,
    real: bool,
) -> tuple[Curve, tuple[tuple[float, str], ...]]:
    """Run or simulate; return the curve and the events, in seconds of this machine."""
    if not real:
        from atoll.rehearse.simulated import simulated

        return simulated(plan, forecast, elements=elements, expected_s=predicted.end.seconds), ()
    from atoll.cli.jobs.interrupts import Interrupts
    from atoll.cli.views import screen
    from atoll.rehearse.conduct import conduct

    console = screen.errors()
    with tempfile.TemporaryDirectory(prefix="atoll-rehearsal-", ignore_cleanup_errors=True) as made:
        folder = options.keep.resolve() if options.keep is not None else Path(made)
        with Interrupts() as interrupts:
            found = conduct(
                plan, folder, expected_s=predicted.end.seconds, pause=interrupts.sleep,
                say=lambda text: console.print(f"[dim]{text}[/]", soft_wrap=True),
            )  # fmt: skip
        if interrupts:
            raise KeyboardInterrupt
    return found.curve, found.events


def with_losses(
    curve: Curve, law: Path | None, load: Workload, forecast: Forecast, *, slower: float
) -> Curve:
    """Return the predicted curve with losses, if there is a law."""
    if law is None:
        return curve
    import dataclasses

    from atoll.forecast.loss import HOUR_S, loss_after
    from atoll.rehearse.curve import Curve
    from atoll.scaling.saved import read_fit

    fit = read_fit(law)
    return Curve(
        tuple(
            dataclasses.replace(
                one,
                loss=loss_after(
                    fit, load, forecast, hours=max(one.seconds, 1e-3) / slower / HOUR_S
                ).loss,
            )
            for one in curve.moments
        )
    )


def _notes(plan: Rehearsal, fleet: Fleet, options: RehearsalOptions, *, why_not: str) -> list[str]:
    from atoll.rehearse.rehearsal import EVAL_TOKENS

    notes = list(fleet.notes)
    if plan.slower > 1:
        notes.append(
            f"this machine is slower: everything took {plan.slower:.3g} times as long here; "
            "times above are those of the fleet"
        )
    if why_not:
        notes.append(f"simulated, not run: {why_not}")
    else:
        notes.append(f"evaluations were cut to {EVAL_TOKENS:,} tokens")
    if options.law is None:
        notes.append(
            "no loss is predicted without a scaling law of this model: atoll scaling sweep and "
            "atoll scaling fit RUNS --out law make one, then --law law/scaling.json"
        )
    return notes


def _read(job: Path, settings: list[str] | tuple[str, ...]) -> JobSpec:
    from atoll.cli.jobs.jobfile import Overrides, read_target

    return read_target(job, Overrides(settings=settings)).spec


def _answered(spec: JobSpec, fleet: Fleet, *, plan: str) -> JobSpec:
    """Return the job with the planner's answers for these machines."""
    from atoll.forecast.automatic import answer_keys, answered
    from atoll.forecast.candidates import SearchSpace
    from atoll.forecast.keys import without_auto
    from atoll.forecast.predict import Planner
    from atoll.forecast.ranking import rank
    from atoll.forecast.workload import workload_of

    if not plan:
        return answer_keys(spec, fleet)[0]
    load = workload_of(without_auto(spec))
    ranking = rank(Planner(load), fleet, space=SearchSpace(whole_fleet=True))
    return answered(spec, ranking.best.candidate)
