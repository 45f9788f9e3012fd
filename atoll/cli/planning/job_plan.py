"""`atoll plan JOB.toml`: gathers machines, model and law, ranks, and shows the result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli import hub_access
from atoll.cli.planning.lines_of_hub import links_between
from atoll.errors import ConfigError, unknown
from atoll.fleet.fleet import Fleet
from atoll.fleet.measured import failures_of_events, fleet_of_nodes
from atoll.fleet.reading import read_fleet
from atoll.methods.table import PRESETS

if TYPE_CHECKING:
    from atoll.forecast.answer import Answer
    from atoll.forecast.candidates import SearchSpace

NO_HUB = "name the machines in a file: --machines fleet.toml"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was requested on the command line."""

    job: Path
    machines: Path | None = None
    hub: str = ""
    law: Path | None = None
    target: float | None = None
    methods: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def answer(question: Question) -> Answer:
    """Rank the candidates of a job.

    Raises:
        ConfigError: the job, the machines or the law cannot be used; says which figure is missing.
        PlanError: nothing fits.
    """
    from atoll.cli.jobs.jobfile import Overrides, read_target
    from atoll.forecast.answer import answer_for
    from atoll.scaling.saved import read_fit

    if question.target is not None and question.law is None:
        raise ConfigError(
            "the time to a loss needs a scaling law",
            given=f"--loss {question.target:g}", expected="--law scaling.json",
            remedy="atoll scaling sweep, then atoll scaling fit --out law",
        )  # fmt: skip
    spec = read_target(question.job, Overrides(settings=question.settings)).spec
    fleet = known_fleet(question.machines, question.hub)
    fit = read_fit(question.law) if question.law is not None else None
    return answer_for(
        spec, fleet, space=_search_space(question.methods), fit=fit, target=question.target
    )


def known_fleet(machines: Path | None, hub: str) -> Fleet:
    """Return the machines of a file, or those that are online at a hub."""
    if machines is not None:
        return read_fleet(machines)
    known = hub_access.find(hub, without=NO_HUB)
    with known.client() as client:
        events, rows = client.hub_events()["events"], client.nodes()
    return fleet_of_nodes(
        rows, failures_per_day=failures_of_events(events, now=time.time()),
        links=links_between(known.url, rows),
    )  # fmt: skip


def _search_space(methods: tuple[str, ...]) -> SearchSpace | None:
    from atoll.forecast.candidates import SearchSpace
    from atoll.forecast.efficiency import known

    for name in methods:
        if name not in PRESETS:
            raise unknown("method", name, PRESETS)
        if not known(name):
            raise ConfigError(
                "nothing was measured of what this method costs in loss", given=name,
                expected=f"one of {', '.join(filter(known, PRESETS))}",
                remedy="compare it in a short run: atoll run --preset",
            )  # fmt: skip
    return SearchSpace(presets=methods) if methods else None


def lines_to_paste(question: Question) -> list[str]:
    """Return the lines that the planner would write into a job file."""
    found = answer(question)
    return found.ranking.best.candidate.toml(of=len(found.fleet)).strip().splitlines()


def show(question: Question, *, all_: bool, as_json: bool) -> None:
    """Print the answer."""
    import json

    from atoll.cli.views import screen
    from atoll.cli.views.method_plan import page
    from atoll.forecast.answer import figures

    found = answer(question)
    if as_json:
        typer.echo(json.dumps(figures(found), indent=1))
        return
    for drawn in page(found, all_=all_):
        screen.output().print(drawn)
