"""`atoll run --plan auto`, and keys that are `auto`: the planner's choice at the job's start."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from atoll.cli.hub_access import KnownHub
from atoll.cli.planning.lines_of_hub import links_between
from atoll.errors import AtollError, ConfigError
from atoll.fleet.fleet import Fleet, few
from atoll.fleet.measured import failures_of_events, fleet_of_nodes
from atoll.forecast.automatic import answer_keys, answered
from atoll.forecast.keys import open_keys, without_auto

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.cli.jobs.jobfile import Submission
    from atoll.config import JobSpec


def choose(
    submission: Submission, *, plan: str, hub: KnownHub | None, console: Console
) -> Submission:
    """Return the job with the planner's answers, after printing them.

    Without measured machines an `auto` key keeps its method's default, which is printed too;
    `--plan auto` is refused.

    Args:
        submission: The job.
        plan: `auto`: method, members and route too; empty: only its keys that are `auto`.
        hub: Where it runs; None: on this machine alone, whose members have no lines to plan for.
        console: For the choice.

    Raises:
        ConfigError: nothing can be planned; says which figure is missing.
    """
    if hub is None:
        if plan:
            raise ConfigError(
                "there is nothing to plan on one machine", given="--plan auto with --local",
                expected="machines of a hub",
                remedy="atoll plan job.toml --machines fleet.toml; or leave --plan out",
            )  # fmt: skip
        return _default(submission, "members on this machine have no lines to plan for", console)
    try:
        fleet = online(hub, submission.spec)
        if plan:
            return _whole(submission, fleet, console)
        spec, ranking = answer_keys(submission.spec, fleet)
    except AtollError as error:
        if plan:
            raise
        return _default(submission, f"{error.what} ({error.given})", console)
    keys = open_keys(submission.spec)
    table = spec.strategy
    values = {"codec": table.codec, **table.options}
    said = ", ".join(f"{name} = {values.get(name, 'default')}" for name in keys)
    console.print(f"[dim]planned[/] {escape(f'{said}: {ranking.reasons[0]}')}", soft_wrap=True)
    return dataclasses.replace(submission, spec=spec)


def _whole(submission: Submission, fleet: Fleet, console: Console) -> Submission:
    from atoll.forecast.predict import Planner
    from atoll.forecast.ranking import rank
    from atoll.forecast.workload import workload_of

    ranking = rank(Planner(workload_of(without_auto(submission.spec))), fleet)
    best = ranking.best.candidate
    choice = escape(f"{best.words()}; {few(best.members)}")
    console.print(f"[dim]planned[/] {choice}", soft_wrap=True, highlight=False)
    for reason in ranking.reasons:
        console.print(f"[dim]- {escape(reason)}[/]", soft_wrap=True, highlight=False)
    return dataclasses.replace(submission, spec=answered(submission.spec, best))


def _default(submission: Submission, why: str, console: Console) -> Submission:
    spec = without_auto(submission.spec)
    measured = open_keys(spec)
    default = [key for key in open_keys(submission.spec) if key not in measured]
    why = escape(why)
    if default:
        console.print(
            f"[yellow]{', '.join(default)}: the default of the method, not a plan: {why}[/]",
            soft_wrap=True,
        )
    if measured:
        console.print(f"[dim]{', '.join(measured)}: by measured rounds alone: {why}[/]")
    return dataclasses.replace(submission, spec=spec)


def online(hub: KnownHub, spec: JobSpec) -> Fleet:
    """Return the machines that are online and named by the job, at most as many as it wants."""
    with hub.client() as client:
        rows = client.nodes()
        events = client.hub_events()["events"]
    wanted: Sequence[str] = spec.job.on
    rows = [row for row in rows if not wanted or row["node"] in wanted]
    fleet = fleet_of_nodes(
        rows, failures_per_day=failures_of_events(events, now=time.time()),
        links=links_between(hub.url, rows),
    )  # fmt: skip
    return fleet.with_machines(fleet.machines[: max(1, spec.job.nodes)])
