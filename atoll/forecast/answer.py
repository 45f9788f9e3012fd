"""A job, the machines it was planned for and the ranking, with its figures as values for JSON.

Loads torch only by `answer_for`, which asks the model for its shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet
from atoll.forecast.candidates import SearchSpace
from atoll.forecast.keys import without_auto
from atoll.forecast.loss import hours_to, loss_after
from atoll.forecast.predict import Forecast, Planner
from atoll.forecast.ranking import Ranking, gains, rank
from atoll.forecast.workload import Workload, workload_of
from atoll.scaling.fit import Fit

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The ranking, and what it was made of."""

    spec: JobSpec
    fleet: Fleet
    workload: Workload
    ranking: Ranking
    fit: Fit | None = None
    target: float | None = None


def answer_for(
    spec: JobSpec, fleet: Fleet, *, space: SearchSpace | None = None, fit: Fit | None = None,
    target: float | None = None,
) -> Answer:  # fmt: skip
    """Rank the candidates of a job on a fleet.

    Args:
        spec: The job; keys that are `auto` are open.
        fleet: The machines.
        space: What is fixed.
        fit: A scaling law of this model.
        target: The loss to which hours are counted.

    Raises:
        ConfigError: no method can be chosen for this job; says which figure is missing.
        PlanError: nothing fits.
    """
    workload = workload_of(without_auto(spec))
    ranking = rank(Planner(workload), fleet, space=space)
    return Answer(
        spec=spec, fleet=fleet, workload=workload, ranking=ranking, fit=fit, target=target
    )


def best_of_each(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the first of every method."""
    first: dict[str, Forecast] = {}
    for one in forecasts:
        first.setdefault(one.candidate.preset, one)
    return list(first.values())


def figures(found: Answer, shown: Sequence[Forecast] = ()) -> dict[str, Any]:
    """Return the answer as values for JSON, with all candidates or those that are `shown`."""
    return {
        "job": found.spec.job.name, "model": found.spec.model.name,
        "parameters": found.workload.parameters, "machines": len(found.fleet),
        "notes": list(found.fleet.notes), "reasons": list(found.ranking.reasons),
        "left_out": list(found.ranking.left_out), "best": _row(found, found.ranking.best),
        "alone": _row(found, found.ranking.alone),
        "candidates": [_row(found, forecast) for forecast in shown or found.ranking.forecasts],
        "toml": found.ranking.best.candidate.toml(of=len(found.fleet)),
    }  # fmt: skip


def _row(found: Answer, one: Forecast) -> dict[str, Any]:
    """Return one candidate; losses only with a law, the time to a loss only with a target."""
    low, middle, high = gains(one, found.ranking.alone)
    hours = hours_of(found, one)
    row: dict[str, Any] = {
        **dataclasses.asdict(one.candidate), "members": list(one.candidate.members),
        "step_s": one.step_s, "step_low_s": one.step_low_s, "step_high_s": one.step_high_s,
        "waiting_s": one.waiting_s, "round_s": one.round_s,
        "every": None if math.isinf(one.every) else one.every, "sent_bytes": one.sent_bytes,
        "received_bytes": one.received_bytes, "fits": one.fits, "up": one.up,
        "tokens_per_s": one.tokens_per_s, "of_alone": middle, "of_alone_low": low,
        "of_alone_high": high, "hours": hours, "price_per_hour": one.price_per_hour,
        "price": one.price_per_hour * hours if one.price_per_hour else None,
        "ground": one.gain.ground, "grounds": list(one.grounds),
    }  # fmt: skip
    if found.fit is not None:
        row["loss"] = dataclasses.asdict(loss_of(found, one))
        if found.target is not None:
            until = hours_until(found, one)
            row["to_target"] = {
                name: None if math.isinf(value) else value for name, value in until.items()
            }
    return row


def hours_of(found: Answer, one: Forecast) -> float:
    """Return the hours of the job as it is written: so many steps of the fastest member."""
    return found.workload.steps * one.step_s / one.up / HOUR_S


def loss_of(found: Answer, one: Forecast) -> Any:
    """Return the loss at the end of the job's steps."""
    if found.fit is None:
        raise ConfigError("a loss cannot be predicted without a law")
    return loss_after(found.fit, found.workload, one, hours=hours_of(found, one))


def hours_until(found: Answer, one: Forecast) -> dict[str, float]:
    """Return the hours until the target loss: `hours`, and the ends `low` and `high`."""
    if found.fit is None or found.target is None:
        raise ConfigError("a time to a loss needs a law and a target")
    return dataclasses.asdict(hours_to(found.fit, found.workload, one, target=found.target))
