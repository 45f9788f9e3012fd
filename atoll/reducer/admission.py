"""Who is let in: the filter of contributions by their norms.

Identity, schema, sizes and the base version are checked before a contribution gets here, and values
that are not finite are left out by every policy. `norms:K:FLOOR` then goes on in this order:

  * a norm above max(K times the median of the round, FLOOR) is rejected;
  * after ten rounds also one that stands four deviations above what was usual, unless the round's
    median does so too: then all have changed, and only the round itself can be a measure;
  * if more than a third was rejected the round is not committed: such a judgement is not trusted;
  * what is left is shortened to max(K / 2 times the median, FLOOR), and weighs at most four times
    the median weight;
  * three rejections within twenty rounds, and nothing is taken from that member any more.

Pure: histories come in and go out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from atoll.errors import AtollError, GroupError, PeerRefused
from atoll.reducer.norm_history import History
from atoll.reducer.policies import Rule

DEFAULT_TIMES_MEDIAN = 4.0
WARM_UP_ROUNDS = 10
LARGEST_DEVIATION = 4.0
LEAST_DEVIATION = 0.25
"""Floor of the deviation of log norms: small differences are no attack, however rare they were."""
DECAY = 0.1
"""Share of the newest round in what is usual."""
HEAVIEST = 4.0
"""Times the median weight."""
STRIKES, STRIKES_WITHIN_ROUNDS = 3, 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A contribution, as far as the filter looks at it."""

    member: str
    norm: float
    """Finite."""
    weight: float
    """Above 0."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What is to become of the candidates."""

    scales: Mapping[str, float]
    """Member -> what its values are multiplied by; who is not in it was rejected."""
    weights: Mapping[str, float]
    rejected: Mapping[str, AtollError]
    history: History
    """What is known after this round."""


def admit(
    candidates: Sequence[Candidate],
    bad: Mapping[str, AtollError],
    *,
    rule: Rule,
    history: History,
    round_: int,
) -> Admitted:
    """Return who is let in, and how.

    Args:
        candidates: Contributions of finite values.
        bad: Contributions of others, and why they are out already; they count as rejected.
        rule: `norms`, with its numbers.
        history: What is known of the rounds before.
        round_: This one.

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
    heaviest = HEAVIEST * median_low([c.weight for c in let_in])
    return Admitted(
        scales={c.member: _scale(c.norm, longest) for c in let_in},
        weights={c.member: min(c.weight, heaviest) for c in let_in},
        rejected=rejected,
        history=_after(history, [min(c.norm, longest) for c in let_in], rejected, round_),
    )


def _reason(norm: float, middle: float, *, times: float, floor: float, history: History) -> str:
    """Return why a norm is rejected; empty if it is not."""
    if norm <= floor or middle == 0.0:
        return ""  # where most did not move at all, shortening leaves nothing of the rest
    if norm > times * middle:
        return f"norm {norm:.3g}, more than {times:g} times the median {middle:.3g}"
    if history.rounds < WARM_UP_ROUNDS:
        return ""
    away = _deviations(norm, history)
    if away > LARGEST_DEVIATION >= _deviations(middle, history):
        return f"norm {norm:.3g}, {away:.1f} deviations above what was usual"
    return ""


def _deviations(norm: float, history: History) -> float:
    """Return how far a norm stands above the usual ones, in deviations of their logarithm."""
    variance = max(0.0, history.log_norm_square - history.log_norm**2)
    return (math.log(norm) - history.log_norm) / max(math.sqrt(variance), LEAST_DEVIATION)


def _scale(norm: float, longest: float) -> float:
    return longest / norm if norm > longest else 1.0


def _rejection(member: str, reason: str) -> AtollError:
    return GroupError(
        "a contribution was not admitted", given=f"{reason}, from {member}",
        expected="an update like those of the others; it was left out",
        remedy="three of these within twenty rounds, and nothing is taken from this member",
    )  # fmt: skip


def _check_quorum(rejected: Mapping[str, AtollError], total: int) -> None:
    """Refuse to judge where too many would be rejected."""
    if 3 * len(rejected) > total:
        reasons = "; ".join(f"{error.what} ({error.given})" for error in rejected.values())
        raise PeerRefused(
            "more than a third of the contributions would be rejected; the round is not committed",
            given=f"{len(rejected)} of {total}: {reasons}",
            expected="at most a third",
            remedy="find out who is wrong: the filter cannot tell",
        )


def _after(
    history: History, norms: Sequence[float], rejected: Mapping[str, AtollError], round_: int
) -> History:
    """Return the history with this round in it."""
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
    """Return an error for each member from whom nothing is taken any more."""
    return {
        member: GroupError(
            "this member's contributions are not taken any more",
            given=f"{member}, rejected {STRIKES} times within {STRIKES_WITHIN_ROUNDS} rounds",
            expected="updates like those of the others",
            remedy="look at its data, precision and learning rate; a restarted reducer starts anew",
        )
        for member in members
        if member in history.evicted
    }  # fmt: skip
