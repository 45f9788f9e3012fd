"""`atoll scaling`: laws of the loss from finished runs, and the sweeps that make the runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.jobs.interrupts import remembering_interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.scaling.fit import Fit
    from atoll.scaling.optimum import Optimum
    from atoll.scaling.predict import Prediction
    from atoll.scaling.rates import RateLaw
    from atoll.scaling.runs import Found

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    help="Scaling laws: how the loss depends on size, data, members and rounds.",
)


@app.callback()
def scaling() -> None:
    """Scaling laws: how the loss depends on size, data, members and rounds."""


@app.command("fit")
def fit(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or of a sweep; a .csv; or a scaling.json."),
    ],
    law: Annotated[
        str, typer.Option(help="Variables, e.g. params,tokens (default: all that differ).")
    ] = "",
    shape: Annotated[
        str, typer.Option(help="Formula of these variables (default: the best of left-out runs).")
    ] = "",
    count: Annotated[
        str, typer.Option(help="Parameters that count: all, or non-embedding (default if known).")
    ] = "",
    predict: Annotated[
        list[str] | None,
        typer.Option("--predict", help="params=N,tokens=D,members=M,every=H; repeatable."),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="FLOPs: give the best params and tokens; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for scaling.json and scaling.html.")
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=1, max=10_000, help="Fits with drawn errors, for the intervals.")
    ] = 200,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Fit a scaling law to finished runs, predict losses, and find the best size for a budget.

    Every number comes with its interval, and with the error at which the largest size was
    predicted from the smaller ones.

    Examples:
        atoll scaling fit runs/*
        atoll scaling fit runs/sweep --predict params=1e6,tokens=2e7 --budget 1e15
        atoll scaling fit points.csv --law params,members --out law
    """
    import json

    from atoll.cli.views import screen
    from atoll.errors import FitError
    from atoll.scaling.optimum import compute_optimal
    from atoll.scaling.predict import prediction_for
    from atoll.scaling.rates import HYPERPARAMETERS, fit_rate
    from atoll.scaling.saved import to_dict

    settings = [parse_settings(text) for text in predict or ()]
    found, fitted = _fitted(runs, law=law, shape=shape, count=count, resamples=resamples)
    rates = []
    for name in HYPERPARAMETERS:
        if found is not None and len({point.value(name) for point in found.points} - {0.0}) > 2:
            try:
                rates.append(fit_rate(found.points, name))
            except FitError as error:
                screen.errors().print(f"[dim]no law of {name}: {error.what}[/]", soft_wrap=True)
    predictions = [prediction_for(fitted, at) for at in settings]
    first = settings[0] if settings else {}
    more = {name: first.get(name, 0.0) for name in ("members", "every")}
    optima = [compute_optimal(fitted, flops, **more) for flops in budget or ()]
    skipped = found.skipped if found else ()
    if out is not None:
        _write(out, fitted, predictions, optima)
    if json_:
        answers = _answers(predictions, optima, rates)
        typer.echo(json.dumps({**to_dict(fitted), **answers, "skipped": list(skipped)}, indent=1))
        return
    from atoll.cli.views.scaling import page

    console = screen.output()
    for drawn in page(fitted, skipped=skipped, rates=rates, predictions=predictions, optima=optima):
        console.print(drawn)
    if out is not None:
        console.print(f"page   {screen.shown(out / 'scaling.html')}", markup=False)


def _fitted(
    runs: Sequence[Path], *, law: str, shape: str, count: str, resamples: int
) -> tuple[Found | None, Fit]:
    """Return what was read and the law; of a saved law only the latter."""
    from atoll.scaling.fit import fit as fit_law
    from atoll.scaling.runs import read_points
    from atoll.scaling.saved import read_fit

    if len(runs) == 1 and runs[0].suffix == ".json":
        return None, read_fit(runs[0])
    from atoll.errors import TooFewPoints

    found = read_points(runs, count=count)
    if not found.points:
        raise TooFewPoints(
            "none of these is a finished run",
            given="; ".join(found.skipped[:3]) or ", ".join(str(path) for path in runs[:3]),
            expected="folders with summary.json and job.toml",
            remedy="atoll scaling sweep makes runs; `atoll run` leaves each in runs/JOB",
        )
    names = [name.strip() for name in law.split(",") if name.strip()]
    fitted = fit_law(
        found.points, variables=names, shape=shape, resamples=resamples, counted=found.counted
    )
    return found, fitted


def _write(
    out: Path, fitted: Fit, predictions: Sequence[Prediction], optima: Sequence[Optimum]
) -> None:
    from atoll.scaling import page, saved
    from atoll.train.results.summary import write_whole

    saved.write_fit(out / saved.NAME, fitted)
    text = page.render(fitted, predictions=predictions, optima=optima)
    write_whole(out / "scaling.html", text)


def _answers(
    predictions: Sequence[Prediction], optima: Sequence[Optimum], rates: Sequence[RateLaw]
) -> dict[str, Any]:
    """Return what was requested as values for JSON."""
    import dataclasses

    return {
        "predictions": [dataclasses.asdict(one) for one in predictions],
        "budgets": [dataclasses.asdict(one) for one in optima],
        "rates": [dataclasses.asdict(one) for one in rates],
    }


def parse_settings(text: str) -> dict[str, float]:
    """Return the values of `params=1e6,tokens=2e7`.

    Raises:
        ConfigError: it cannot be read.
    """
    from atoll.errors import ConfigError

    found: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        try:
            if not (name and equals) or name in found:
                raise ValueError
            found[name] = float(value)
        except ValueError:
            raise ConfigError(
                "these settings cannot be read", given=repr(text),
                expected="NAME=NUMBER, each name once, with commas between them",
                remedy="--predict params=1e6,tokens=2e7",
            ) from None  # fmt: skip
    return found


@app.command("sweep")
@remembering_interrupts
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="What to vary, and a job.")],
    local: Annotated[
        int | None, typer.Option(min=1, help="On this machine only, so many members side by side.")
    ] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of its runs (default: runs/NAME).")
    ] = None,
    files: Annotated[
        Path | None, typer.Option("--files", help="Only write the job files, to this folder.")
    ] = None,
) -> None:
    """Run a sweep: every size with every number of tokens, members and steps between rounds.

    As many runs go on at once as there are machines. What has ended is not run again: the same
    command goes on where it was interrupted.

    Examples:
        atoll scaling sweep examples/scaling_sweep.toml --local 2
        atoll scaling sweep sweep.toml --files jobs
    """
    from atoll.cli.jobs.precheck import check_names
    from atoll.cli.views import screen
    from atoll.config import dump_spec
    from atoll.scaling.sweep import read_sweep

    wanted = read_sweep(file)
    console = screen.output()
    if files is not None:
        files.mkdir(parents=True, exist_ok=True)
        for run in wanted.runs:
            text = dump_spec(run.spec)
            (files / f"{run.key}.toml").write_text(text, encoding="utf-8", newline="\n")
        console.print(f"{len(wanted.runs)} job files in {screen.shown(files)}", markup=False)
        return
    for run in wanted.runs:
        check_names(run.spec, here=local is not None)
    from atoll.cli.jobs.sweep import run_here, run_on_hub

    folder = out or Path("runs") / wanted.name
    if local is not None:
        raise typer.Exit(run_here(wanted, folder=folder, nodes=local, console=console))
    from atoll.cli import hub_access

    raise typer.Exit(run_on_hub(hub_access.find(hub), wanted, folder=folder, console=console))
