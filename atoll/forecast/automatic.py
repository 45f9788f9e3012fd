"""The planner's answers at the start of a job: to its open keys, or to all of its method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.config import JobSpec
from atoll.config.train_checks import PLANNED
from atoll.fleet.fleet import Fleet
from atoll.forecast.candidates import EVERY, Candidate, SearchSpace
from atoll.forecast.keys import AUTO, begin_with, open_keys, without_auto
from atoll.forecast.predict import Forecast, Planner
from atoll.forecast.ranking import NOTABLE, Ranking, progress, rank
from atoll.forecast.workload import workload_of

PLAIN = "mean"
"""Aggregation that every collective can do; robust ones need all contributions in one place."""


def answered(spec: JobSpec, candidate: Candidate) -> JobSpec:
    """Return the job with a candidate's method, route and members."""
    table = dataclasses.replace(
        spec.strategy, preset=candidate.preset, outer="", codec=candidate.codec,
        collective=candidate.collective, options=dict(candidate.options),
    )  # fmt: skip
    job = dataclasses.replace(
        spec.job, nodes=len(candidate.members), on=list(candidate.members),
        min_nodes=min(spec.job.min_nodes, len(candidate.members)),
        route=spec.job.route if candidate.alone else candidate.route,
    )  # fmt: skip
    return _planned(dataclasses.replace(spec, job=job, strategy=table))


def _planned(spec: JobSpec, *, keys: Sequence[str] = PLANNED) -> JobSpec:
    """Return the job with the keys that its hub plans again: of these, all that may change."""
    wanted = dataclasses.replace(spec, job=dataclasses.replace(spec.job, planned=list(keys)))
    job = dataclasses.replace(spec.job, planned=wanted.planned_again)
    return dataclasses.replace(spec, job=job)


def answer_again(
    spec: JobSpec, fleet: Fleet, keys: Sequence[str], *, current: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what these keys of a running job should be on the machines that it has now.

    A key keeps its current value unless another one promises notably more progress.

    A codec and a delay follow measured rounds from then on.

    Returns:
        `answers` by key, `progress` against the current values, `reasons` in words, and `round_s`:
        the predicted seconds of a round.

    Raises:
        ConfigError: a machine's speed or line is not known.
        PlanError: no answer fits.
    """
    load = workload_of(spec)
    fixed = dataclasses.replace(SearchSpace.of(spec), whole_fleet=True)
    now = {"every": fixed.every[0], "collective": fixed.collective, **current}
    space = dataclasses.replace(
        fixed, every=tuple(sorted({*EVERY, int(now["every"])})) if "every" in keys else fixed.every,
        collective=AUTO if "collective" in keys else fixed.collective,
    )  # fmt: skip
    ranking = rank(Planner(load), fleet, space=space)
    best, kept = ranking.best, _like(ranking.forecasts, now)
    if kept is not None and progress(best) < (1 + NOTABLE) * progress(kept):
        best = kept
    best = _most_precise(ranking.forecasts, best, order=space.codecs)
    found = {
        "every": best.candidate.options.get("every", now["every"]),
        "collective": best.candidate.collective, "codec": best.candidate.codec,
        "delay": best.delay,
    }  # fmt: skip
    answers = {key: found[key] for key in keys}
    gain = progress(best) / progress(kept) if kept is not None else None
    return {
        "answers": answers, "progress": gain, "reasons": list(ranking.reasons),
        "round_s": best.round_s,
    }  # fmt: skip


def _most_precise(
    forecasts: Sequence[Forecast], best: Forecast, *, order: Sequence[str]
) -> Forecast:
    """Return the forecast with the first codec of `order` that costs no notable progress.

    What precision is worth is not measured for each codec: time alone would always give it up.
    """
    like = [
        one
        for one in forecasts
        if dataclasses.replace(one.candidate, codec=best.candidate.codec) == best.candidate
        and progress(one) * (1 + NOTABLE) >= progress(best)
    ]
    return min(like, key=lambda one: order.index(one.candidate.codec), default=best)


def _like(forecasts: Sequence[Forecast], now: Mapping[str, Any]) -> Forecast | None:
    """Return the best forecast with these values of `every` and `collective`."""
    return next(
        (
            one
            for one in forecasts
            if one.candidate.options.get("every", now["every"]) == now["every"]
            and one.candidate.collective == now["collective"]
        ),
        None,
    )


def answer_keys(spec: JobSpec, fleet: Fleet) -> tuple[JobSpec, Ranking]:
    """Return the job with its open keys answered for these machines, and why.

    All machines of the fleet take part; the file's method and other options stay. A collective
    that the file leaves open is answered as well.

    Raises:
        ConfigError: a machine's speed or line is not known.
        PlanError: no answer fits.
    """
    load = workload_of(without_auto(spec))
    space = dataclasses.replace(SearchSpace.of(spec), whole_fleet=True)
    ranking = rank(Planner(load), fleet, space=space)
    forecast = _most_precise(ranking.forecasts, ranking.best, order=space.codecs)
    best, keys = forecast.candidate, open_keys(spec)
    answers = {name: best.options[name] for name in keys if name in best.options}
    if answers.get("delay") == AUTO:
        answers["delay"] = f"{AUTO}:{forecast.delay}"
    options = {**without_auto(spec).strategy.options, **answers}
    table, collective = spec.strategy, spec.strategy.collective
    left_open = table.aggregate == PLAIN and collective == AUTO and AUTO not in table.codec
    if left_open and best.route == "direct":
        collective = best.collective  # `auto` would be the ring, whatever the lines are
    codec = begin_with(table.codec, best.codec) if "codec" in keys else table.codec
    table = dataclasses.replace(table, options=options, collective=collective, codec=codec)
    keys = (*keys, *(("collective",) if left_open else ()))
    return _planned(dataclasses.replace(spec, strategy=table), keys=keys), ranking
