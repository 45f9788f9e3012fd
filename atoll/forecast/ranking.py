"""Candidates in order, and the reasons in words: what hurts, what helps, whether one is enough.

The order is by progress per second: tokens that data parallel would need for the same progress.
Every what-if is the same prediction on a changed fleet.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError, PlanError
from atoll.fleet.fleet import Fleet, Machine
from atoll.forecast.candidates import Candidate, SearchSpace, candidates
from atoll.forecast.predict import NETWORK_ERROR, Forecast, Planner

NOTABLE = 0.02
"""A change of less is not worth a word."""
FASTER = 2.0
"""What-ifs double a line."""
HIDDEN_SHARE = 0.1
"""Waiting below this share of a step is not the problem."""

Score = Callable[[Forecast], float]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The candidates, best first, and what to say about the first."""

    forecasts: tuple[Forecast, ...]
    alone: Forecast
    """The fastest machine by itself."""
    reasons: tuple[str, ...]
    left_out: tuple[str, ...]
    """What was not ranked, and why."""

    @property
    def best(self) -> Forecast:
        """The first."""
        return self.forecasts[0]


def progress(forecast: Forecast) -> float:
    """Return the progress per second, by which candidates are ranked."""
    return forecast.worth_per_s[1]


def rank(
    planner: Planner, fleet: Fleet, *, space: SearchSpace | None = None,
    only: Sequence[Candidate] = (), score: Score = progress,
) -> Ranking:  # fmt: skip
    """Return all candidates in order.

    Args:
        planner: Of the job.
        fleet: The machines.
        space: What the job fixes.
        only: Candidates in place of the usual ones.
        score: Higher is better.

    Raises:
        ConfigError: the speed of a machine is not known.
        PlanError: no candidate can be predicted, or none fits the memory.
    """
    load = planner.workload
    pool = only or candidates(fleet, steps=load.steps, optimizer=load.optimizer, space=space)
    found: list[Forecast] = []
    refused: dict[str, int] = {}
    for candidate in pool:
        try:
            forecast = planner.predict(fleet, candidate)
        except ConfigError as error:
            why = f"{error.what}: {error.given}"
            refused[why] = refused.get(why, 0) + 1
            continue
        if forecast.fits is False:
            why = f"{len(candidate.members)} members: the model does not fit the memory of one"
            refused[why] = refused.get(why, 0) + 1
            continue
        found.append(forecast)
    left_out = tuple(f"{count} candidates: {why}" for why, count in refused.items())
    if not found:
        raise PlanError(
            "nothing can be planned for these machines",
            given="; ".join(left_out) or "no candidate",
            expected="machines with known speed and lines, and memory for the model",
            remedy="measure them (atoll doctor), or cut the model: atoll plan memory",
        )  # fmt: skip
    found.sort(key=lambda forecast: (-score(forecast), forecast.sent_bytes))
    singles = [forecast for forecast in found if forecast.candidate.alone]
    alone = singles[0] if singles else _alone(planner, fleet)
    together = any(not forecast.candidate.alone for forecast in found)
    if together or len(fleet) == 1:
        reasons = tuple(_reasons(planner, fleet, found[0], alone))
    else:  # nothing to compare with: not a finding
        name = alone.candidate.members[0]
        reasons = (f"only {name} alone can be predicted: see what was left out, and why",)
    return Ranking(forecasts=tuple(found), alone=alone, reasons=reasons, left_out=left_out)


def _alone(planner: Planner, fleet: Fleet) -> Forecast:
    fastest = min(fleet.machines, key=lambda machine: planner.workload.step_on(machine).seconds)
    return planner.predict(fleet, Candidate(preset="alone", members=(fastest.name,)))


# ------------------------------------------------------------------------------------ in words


def _reasons(planner: Planner, fleet: Fleet, best: Forecast, alone: Forecast) -> Iterator[str]:
    yield from _worth(best, alone)
    if best.candidate.alone:
        yield from _why_alone(planner, fleet, best)
        return
    yield from _time(best)
    yield from _hurts(planner, fleet, best)
    yield from _helps(planner, fleet, best)


def _worth(best: Forecast, alone: Forecast) -> Iterator[str]:
    name = alone.candidate.members[0]
    if best.candidate.alone:
        yield f"one machine alone is better: {name}"
        return
    low, middle, high = gains(best, alone)
    yield f"{middle:.2f} times the progress of {name} alone ({low:.2f} to {high:.2f})"
    if low < 1:
        yield (
            "whether it beats one machine alone is not certain: what rare rounds cost this model "
            "is not known; fit a scaling law (atoll scaling sweep), or compare a short run"
        )


def gains(one: Forecast, alone: Forecast) -> tuple[float, float, float]:
    """Return the progress against one machine alone: low, middle, high.

    A speed that is estimated is wrong on both sides alike, so only rounds and worth count here.
    """
    rate = one.up / one.step_s / (alone.up / alone.step_s)
    share = one.waiting_s / one.step_s * NETWORK_ERROR
    low, middle, high = one.members_worth
    return low * rate / (1 + share), middle * rate, high * rate / (1 - share)


def _why_alone(planner: Planner, fleet: Fleet, best: Forecast) -> Iterator[str]:
    """Say what keeps the others from helping."""
    if len(fleet) == 1:
        yield "there is no other machine"
        return
    speeds = [1 / planner.workload.step_on(machine).seconds for machine in fleet.machines]
    others = sum(speeds) - max(speeds)
    if others < max(speeds):
        yield (
            f"all others together compute {others / max(speeds):.2f} times as much as it does, "
            "less than what meeting costs"
        )
    faster = fleet.with_machines(
        dataclasses.replace(m, up_mbps=1e4, down_mbps=1e4, latency_ms=1.0) for m in fleet.machines
    )
    together = rank_first(planner, faster)
    if together is not None and not together.candidate.alone:
        ratio = progress(together) / progress(best)
        words = together.candidate.words()
        yield f"on lines of 10 Gbit/s {words} would be {ratio:.2f} times as fast"


def rank_first(planner: Planner, fleet: Fleet) -> Forecast | None:
    """Return the best candidate without reasons; None if there is none."""
    load, best = planner.workload, None
    for candidate in candidates(fleet, steps=load.steps, optimizer=load.optimizer):
        try:
            found = planner.predict(fleet, candidate)
        except ConfigError:
            continue
        if found.fits is not False and (best is None or progress(found) > progress(best)):
            best = found
    return best


def _time(best: Forecast) -> Iterator[str]:
    share = best.waiting_s / best.step_s
    if share < HIDDEN_SHARE:
        hidden = " and it is hidden behind training" if best.waiting_s == 0 else ""
        yield f"lines are no problem: {share:.0%} of the time is spent waiting for rounds{hidden}"
    else:
        yield (
            f"{share:.0%} of the time is spent waiting for rounds of {best.round_s:.2f} s, "
            f"{_often(best.every)}"
        )


def _often(every: float) -> str:
    """Return how often rounds are."""
    return "in every step" if round(every) <= 1 else f"every {every:.0f} steps"


def _hurts(planner: Planner, fleet: Fleet, best: Forecast) -> Iterator[str]:
    """Name the machine without which the run would lose least, or gain."""
    members = best.candidate.members
    if len(members) < 3:
        return
    without = {
        name: _retried(planner, fleet, best, members=tuple(m for m in members if m != name))
        for name in members[:MOST_TRIED]
    }
    known = {name: value for name, value in without.items() if value is not None}
    if not known:
        return
    name = max(known, key=lambda one: known[one])
    change = known[name] / progress(best) - 1
    if change > NOTABLE:
        yield f"{name} hurts: without it the run would be {change:.0%} faster"
    elif change > -NOTABLE:
        yield f"{name} brings nothing: without it the run would be as fast"
    else:
        yield f"{name} brings least: without it the run would be {-change:.0%} slower"


MOST_TRIED = 16


def _helps(planner: Planner, fleet: Fleet, best: Forecast) -> Iterator[str]:
    """Say what one more machine, or a faster line, would bring."""
    members = fleet.of(best.candidate.members)
    more = _like_the_median(members)
    bigger = fleet.with_machines([*fleet.machines, more])
    value = _retried(planner, bigger, best, members=(*best.candidate.members, more.name))
    if value is not None:
        yield f"one more machine like the median: {value / progress(best) - 1:+.0%}"
    slowest = min(members, key=lambda m: min(m.up_mbps, m.down_mbps) or 1e9)
    if slowest.up_mbps:
        faster = fleet.changed(
            slowest.name, up_mbps=FASTER * slowest.up_mbps, down_mbps=FASTER * slowest.down_mbps
        )
        value = _retried(planner, faster, best, members=best.candidate.members)
        if value is not None:
            change = value / progress(best) - 1
            text = f"a line twice as fast for {slowest.name}: {change:+.0%}"
            yield text if abs(change) > NOTABLE else f"{text}, not worth it"
    slow = max(members, key=lambda m: planner.workload.step_on(m).seconds)
    if planner.workload.step_on(slow).seconds > 1.25 * best.compute_s and len(members) > 1:
        share = best.shares[slow.name]
        yield f"{slow.name} is the slowest and does {share:.0%} of a period's steps"


def _retried(
    planner: Planner, fleet: Fleet, best: Forecast, *, members: tuple[str, ...]
) -> float | None:
    """Return the progress of the same method with other members or on another fleet."""
    preset = "alone" if len(members) == 1 else best.candidate.preset
    changed = dataclasses.replace(best.candidate, members=members, preset=preset)
    try:
        return progress(planner.predict(fleet, changed))
    except ConfigError:
        return None


def _like_the_median(members: Sequence[Machine]) -> Machine:
    """Return a further machine with the median of all figures, at the first one's site."""
    figures = {
        field.name: statistics.median(getattr(machine, field.name) for machine in members)
        for field in dataclasses.fields(Machine)
        if field.type == "Amount"
    }
    return dataclasses.replace(members[0], name="one more", **figures)
