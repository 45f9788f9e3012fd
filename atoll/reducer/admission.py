"""Admission: filter contributions by their norms.

Identity, schema, sizes and the base version are checked before a contribution gets here, and values
that are not finite are left out by every aggregation. `norms:K:FLOOR` then applies, in this order:

 * reject a norm above max(K times the median of the round, FLOOR);
 * after ten rounds also reject a norm more than four deviations above the moving average, unless
   the round's median is too: then all members have changed, and only this round is a reference;
 * if more than a third was rejected, do not commit the round: the filter is not trusted;
 * shorten the rest to max(K / 2 times the median, FLOOR), and limit weights to four times the
   median weight, and of three or more members to a third of the total: a weight is only a claim;
 * evict a member after three rejections within twenty rounds.

Pure: histories are arguments and results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from atoll.errors import AtollError, GroupError, PeerRefused
from atoll.reducer.aggregation import Rule
from atoll.reducer.norm_history import History

DEFAULT_TIMES_MEDIAN = 4.0
WARM_UP_ROUNDS = 10
LARGEST_DEVIATION = 4.0
LEAST_DEVIATION = 0.25
"""Floor of the deviation of log norms: a small difference is no attack, however rare it was."""
DECAY = 0.1
"""Weight of the newest round in the moving averages."""
HEAVIEST = 4.0
"""Times the median weight."""
STRIKES, STRIKES_WITHIN_ROUNDS = 3, 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """The facts about a contribution that the filter uses."""

    member: str
    norm: float
    """Finite."""
    weight: float
    """Above 0."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decision on the candidates of one round."""

    scales: Mapping[str, float]
    """Member -> factor of its values; rejected members are absent."""
    weights: Mapping[str, float]
    rejected: Mapping[str, AtollError]
    history: History
    """Including this round."""


def admit(
    candidates: Sequence[Candidate],
    bad: Mapping[str, AtollError],
    *,
    rule: Rule,
    history: History,
    round_: int,
) -> Admitted:
    """Return the admitted contributions of a round, with their scales and weights.

    `candidates` have finite values; `bad` are contributions rejected earlier, which count as
    rejected.

    Raises:
        PeerRefused: more than a third was rejected.
    """
    times, floor = rule.number(0, DEFAULT_TIMES_MEDIAN), rule.number(1, 0.0)
    middle = median_low([c.norm for c in candidates]) if candidates else 0.0
    rejected = dict(bad)
    for candidate in candidates:
        reason = _reason(candidate.norm, middle, times=times, floor=floor, history=history)
        if reason:
            rejected[candidate.member] = _rejection(candidate.member, reason)
    _check_quorum(rejected, len(candidates) + len(bad))
    let_in = [c for c in candidates if c.member not in rejected]
    longest = max(0.5 * times * middle, floor)
    heaviest = _heaviest([c.weight for c in let_in])
    return Admitted(
        scales={c.member: _scale(c.norm, longest) for c in let_in},
        weights={c.member: min(c.weight, heaviest) for c in let_in},
        rejected=rejected,
        history=_after(history, [min(c.norm, longest) for c in let_in], rejected, round_),
    )


def _reason(norm: float, middle: float, *, times: float, floor: float, history: History) -> str:
    if norm <= floor or middle == 0.0:
        return ""  # if the median is 0, shortening limits the others to the floor
    if norm > times * middle:
        return f"norm {norm:.3g}, more than {times:g} times the median {middle:.3g}"
    if history.rounds < WARM_UP_ROUNDS:
        return ""
    away = _deviations(norm, history)
    if away > LARGEST_DEVIATION >= _deviations(middle, history):
        return f"norm {norm:.3g}, {away:.1f} deviations above what was usual"
    return ""


def _deviations(norm: float, history: History) -> float:
    """Return the distance of a norm above the mean, in deviations of its logarithm."""
    variance = max(0.0, history.log_norm_square - history.log_norm**2)
    return (math.log(norm) - history.log_norm) / max(math.sqrt(variance), LEAST_DEVIATION)


def _heaviest(weights: Sequence[float]) -> float:
    """Return the limit of every weight.

    Weights are tokens that members claim to have trained on, which cannot be verified. The filter
    assumes that at most a third of the contributions are wrong, so of three or more members none
    gets more than a third of the total weight: with three, four times the median would still leave
    a liar 4 of 6 parts. Of two members, neither can be judged.

    The limit c of that third solves c = (k c + r) / 3, where k members reach the limit (never more
    than two need it) and r is the weight of the others.
    """
    limit = HEAVIEST * median_low(weights)
    if len(weights) < 3:
        return limit
    _, second, *others = sorted(weights, reverse=True)
    rest = math.fsum(others)
    third = (second + rest) / 2
    return min(limit, third if second <= third else rest)


def _scale(norm: float, longest: float) -> float:
    return longest / norm if norm > longest else 1.0


def _rejection(member: str, reason: str) -> AtollError:
    return GroupError(
        "a contribution was not admitted", given=f"{reason}, from {member}",
        expected="an update similar to the others; it was left out",
        remedy="after three of these within twenty rounds this member is excluded",
    )  # fmt: skip


def _check_quorum(rejected: Mapping[str, AtollError], total: int) -> None:
    if 3 * len(rejected) > total:
        reasons = "; ".join(f"{error.what} ({error.given})" for error in rejected.values())
        raise PeerRefused(
            "more than a third of the contributions would be rejected; the round is not committed",
            given=f"{len(rejected)} of {total}: {reasons}",
            expected="at most a third",
            remedy="check the members: the filter cannot decide which are wrong",
        )


def _after(
    history: History, norms: Sequence[float], rejected: Mapping[str, AtollError], round_: int
) -> History:
    logs = [math.log(norm) for norm in norms if norm > 0.0]
    if logs:
        rate = max(DECAY, 1.0 / (history.rounds + 1))
        mean = math.fsum(logs) / len(logs)
        square = math.fsum(log * log for log in logs) / len(logs)
        history = replace(
            history, rounds=history.rounds + 1,
            log_norm=history.log_norm + rate * (mean - history.log_norm),
            log_norm_square=history.log_norm_square + rate * (square - history.log_norm_square),
        )  # fmt: skip
    recent = {
        member: tuple(r for r in rounds if r > round_ - STRIKES_WITHIN_ROUNDS)
        for member, rounds in history.strikes.items()
    }
    for member in rejected:
        recent[member] = (*recent.get(member, ()), round_)
    struck = {member for member, rounds in recent.items() if len(rounds) >= STRIKES}
    strikes = {member: rounds for member, rounds in recent.items() if rounds}
    return replace(history, strikes=strikes, evicted=history.evicted | struck)


def evictions(members: Sequence[str], history: History) -> dict[str, AtollError]:
    """Return an error for each evicted member."""
    return {
        member: GroupError(
            "contributions of this member are no longer accepted",
            given=f"{member}, rejected {STRIKES} times within {STRIKES_WITHIN_ROUNDS} rounds",
            expected="updates similar to the others",
            remedy="check its data, precision and learning rate; a restarted reducer accepts it",
        )
        for member in members
        if member in history.evicted
    }  # fmt: skip
