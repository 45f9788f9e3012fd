"""Alarm rules on single members: no contribution, outliers, stragglers, missed rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from atoll.hub.alarms.engine import Finding
from atoll.hub.alarms.facts import Facts, JobFacts
from atoll.hub.alarms.statistics import outliers
from atoll.hub.rounds.timeline import CatchUp, Row
from atoll.ids import spoken
from atoll.rounds.replicas import compare
from atoll.wire.states import JobState, MemberState, RoundMemberState

ZERO_ROUNDS = 3

OUTLIER_ROUNDS = 3
OUTLIER_SIGMA, OUTLIER_RATIO = 8.0, 4.0
"""Distance from the others in robust standard deviations, and as a ratio (or its inverse)."""
OUTLIER_FLOOR = 0.1
"""Norms that differ by less than this share count as equal."""
OWN_PAST = 12
"""Earlier rounds of the same member used for comparison."""

STRAGGLER_ROUNDS, STRAGGLER_LEAST = 10, 5
STRAGGLER_TIMES = 0.7
"""Share of these rounds in which the same member is last..."""
STRAGGLER_SHARE = 0.2
"""... and share of the group's time that this costs."""
STUCK_S, STUCK_PERIODS = 30.0, 3.0
"""A round is stuck if it waits for a member this long, and this many usual rounds."""

STALE_ROUNDS = 5
DIFFERS_FOR_S = 120.0
ENDED_FOR_S = 3_600.0


def zero_contribution(facts: Facts) -> Iterator[Finding]:
    """Find members that take part without contributing; a loss curve would not show it."""
    for job in _running(facts):
        if len(job.rounds) < ZERO_ROUNDS:
            continue
        for member in _present(job, ZERO_ROUNDS):
            why = _why_zero(job, member)
            if why:
                yield Finding(
                    kind="zero-contribution",
                    severity="critical",
                    job=job.job,
                    member=member,
                    node=job.node_of(member),
                    value=0.0,
                    cause=f"{job.who(member)} contributes nothing: {why}",
                    remedy=f"read what it prints: atoll logs {job.job} --member {member}; check "
                    "that the wrapped optimizer is the one that steps and that not everything is "
                    f"frozen; or drain the machine: atoll drain {job.node_of(member)}",
                )


def _why_zero(job: JobFacts, member: str) -> str:
    """Return why a member contributed nothing in the last rounds; empty: it did."""
    rounds = job.rounds[-ZERO_ROUNDS:]
    rows = job.rows_of(member, ZERO_ROUNDS)
    norms = [row.update_norm for row in rows]
    if all(norm is not None and norm == 0.0 for norm in norms):
        return f"its updates were all zero in the last {len(rows)} rounds"
    if all(member not in one.contributors for one in rounds):
        return f"its contributions were left out of the last {len(rounds)} commits"
    others = [row for one in rounds for row in one.rows if row.member != member]
    if all(row.steps == 0 for row in rows) and others and all(row.steps for row in others):
        return f"it did no step in the last {len(rows)} rounds, so its weight is 0"
    return ""


def update_outlier(facts: Facts) -> Iterator[Finding]:
    """Find members with update norms far from those of the others or of their own past."""
    for job in _running(facts):
        for member in _present(job, OUTLIER_ROUNDS):
            ratio = _outlier_ratio(job, member)
            if ratio is None:
                continue
            norm = job.rows_of(member, 1)[-1].update_norm or 0.0
            times = f"{ratio:.1f} times" if ratio >= 1 else f"1/{1 / max(ratio, 1e-9):.0f} of"
            yield Finding(
                kind="update-outlier",
                job=job.job,
                member=member,
                node=job.node_of(member),
                value=norm,
                cause=f"the updates of {job.who(member)} are {times} the usual size "
                f"(norm {norm:.3g}) in {OUTLIER_ROUNDS} rounds in a row",
                remedy="compare its data, learning rate and precision with the others': "
                f"atoll logs {job.job} --member {member}; drain it if it is broken: "
                f"atoll drain {job.node_of(member)}",
            )


def _outlier_ratio(job: JobFacts, member: str) -> float | None:
    """Return the ratio to the usual norm if it is an outlier in every recent round."""
    ratios: list[float] = []
    for one in job.rounds[-OUTLIER_ROUNDS:]:
        norms = {row.member: row.update_norm for row in one.rows if row.update_norm is not None}
        own = norms.pop(member, None)
        if own is None:
            return None
        others = [norm for norm in norms.values() if norm > 0.0]
        past = _past_norms(job, member, one.epoch)
        if len(others) >= 2:
            against = others
        elif len(past) >= OWN_PAST // 2:
            against = past
        else:
            return None
        sigma, ratio = outliers(own, against, floor=OUTLIER_FLOOR)
        far = ratio > OUTLIER_RATIO or ratio < 1 / OUTLIER_RATIO
        # Norms are bounded by zero, so deviations below the median are smaller than above.
        enough = OUTLIER_SIGMA if ratio > 1 else OUTLIER_SIGMA / 2
        if own == 0.0 or abs(sigma) < enough or not far:
            return None
        ratios.append(ratio)
    same_way = all(r > 1 for r in ratios) or all(r < 1 for r in ratios)
    return statistics.median(ratios) if ratios and same_way else None


def _past_norms(job: JobFacts, member: str, before: int) -> list[float]:
    newest = {one.epoch for one in job.rounds[-OUTLIER_ROUNDS:]}
    past = [
        row.update_norm
        for one in job.rounds
        if one.epoch < before and one.epoch not in newest
        for row in one.rows
        if row.member == member and row.update_norm
    ]
    return past[-OWN_PAST:]


def straggler(facts: Facts) -> Iterator[Finding]:
    """Find the member that all others wait for, and the share of time this costs."""
    for job in _running(facts):
        if len(job.waits_for) == 1 and job.waits_s > max(STUCK_S, STUCK_PERIODS * _period_s(job)):
            (member,) = job.waits_for
            yield _stuck(job, member)
            continue
        found = slowest(job.rounds[-STRAGGLER_ROUNDS:])
        if found is None:
            continue
        member, lost, wait_s, period_s = found
        known = job.members.get(member)
        if known is None or known.state != MemberState.RUNNING:
            continue
        yield Finding(
            kind="straggler",
            job=job.job,
            member=member,
            node=known.node,
            value=lost,
            cause=f"{job.who(member)} slows the others down: they wait {wait_s:.1f} s of every "
            f"{period_s:.1f} s round for it, {lost:.0%} of the group's time",
            remedy='let it do fewer steps (pace = "measured" under [train]), or drain it: '
            f"atoll drain {known.node}; see the effect: atoll worth {job.job}",
        )


def slowest(rounds: Sequence[CatchUp]) -> tuple[str, float, float, float] | None:
    """Return the member that is last in most rounds, and the cost; None: there is none.

    The cost: share of all members' time, seconds that the others wait per round, seconds per round.
    """
    last: dict[str, list[tuple[float, float, int]]] = {}
    seen = 0
    for one in rounds:
        timed = [row for row in one.rows if row.wait_s is not None and row.compute_s is not None]
        if len(timed) < 2 or len(timed) < len(one.members):
            continue
        seen += 1
        by_wait = sorted(timed, key=lambda row: row.wait_s or 0.0)
        gap_s = (by_wait[1].wait_s or 0.0) - (by_wait[0].wait_s or 0.0)
        whole_s = statistics.fmean(round_seconds(row) for row in timed)
        last.setdefault(by_wait[0].member, []).append((gap_s, whole_s, len(timed)))
    if seen < STRAGGLER_LEAST:
        return None
    member = max(last, key=lambda m: len(last[m]))
    held = last[member]
    wait_s = statistics.fmean(gap for gap, _, _ in held)
    period_s = statistics.fmean(whole for _, whole, _ in held)
    lost = statistics.fmean(
        (count - 1) / count * gap / whole if whole else 0.0 for gap, whole, count in held
    )
    if len(held) / seen < STRAGGLER_TIMES or lost < STRAGGLER_SHARE:
        return None
    return member, lost, wait_s, period_s


def round_seconds(row: Row) -> float:
    """Return the seconds of one member's whole round, including compute."""
    parts = (row.compute_s, row.wait_s, row.send_s, row.vote_s, row.apply_s)
    return sum(part for part in parts if part is not None)


def _stuck(job: JobFacts, member: str) -> Finding:
    return Finding(
        kind="straggler",
        severity="critical",
        job=job.job,
        member=member,
        node=job.node_of(member),
        value=job.waits_s,
        cause=f"round {len(job.rounds) and job.rounds[-1].round + 1} has waited {job.waits_s:.0f} s"
        f" for {job.who(member)}, much longer than usual",
        remedy=f"see what it does: atoll logs {job.job} --member {member}; continue without it: "
        f"atoll drain {job.node_of(member)}",
    )


def _period_s(job: JobFacts) -> float:
    times = [one.time for one in job.rounds]
    gaps = [b - a for a, b in pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def stale(facts: Facts) -> Iterator[Finding]:
    """Find running members that miss committed rounds."""
    for job in _running(facts):
        newest = job.rounds[-STALE_ROUNDS:]
        if len(newest) < STALE_ROUNDS:
            continue
        for member, known in job.members.items():
            if known.aside:
                continue
            missed = [one for one in newest if one.time > known.since and member not in one.members]
            if known.state != MemberState.RUNNING or len(missed) < STALE_ROUNDS:
                continue
            was_in = [one.round for one in job.rounds if member in one.members]
            since = f"; its last was round {was_in[-1]}" if was_in else ""
            doing = (
                "it is recovering the state"
                if known.round_state == RoundMemberState.RECOVERING
                else "it is disconnected"
            )
            yield Finding(
                kind="stale",
                job=job.job,
                member=member,
                node=known.node,
                value=float(len(missed)),
                cause=f"{job.who(member)} has missed the last {STALE_ROUNDS} commits or more "
                f"({doing}){since}",
                remedy=f"see what it does: atoll logs {job.job} --member {member}; rounds wait "
                "for a member on a slow link only if that pays: try rarer rounds (every = ... "
                f"under [strategy]); or drain it: atoll drain {known.node}",
            )


def replica_mismatch(facts: Facts) -> Iterator[Finding]:
    """Find members with parameters that are not bitwise equal to the others'."""
    for job in facts.jobs:
        for mark in {mark.member: mark for mark in job.differs}.values():
            if facts.now - mark.time <= DIFFERS_FOR_S:
                what = mark.text.removeprefix(mark.member).strip()
                yield _differs(job, mark.member, f"{job.who(mark.member)} {what}")
        if job.ended is None or facts.now - job.ended > ENDED_FOR_S or job.alone:
            continue
        if job.state == JobState.FAILED:  # its members stopped at different steps
            continue
        found = compare({name: m.end for name, m in job.members.items() if m.end})
        for member in found.odd:
            text = f"{job.who(member)} ended with parameters that differ from the rest of its group"
            nodes = {name: one.node for name, one in job.members.items()}
            yield _differs(job, member, f"{text}: {spoken(found.note, nodes)}")


def _differs(job: JobFacts, member: str, cause: str) -> Finding:
    return Finding(
        kind="replica-mismatch",
        severity="critical",
        job=job.job,
        member=member,
        node=job.node_of(member),
        cause=cause,
        remedy="it recovers the others' state by itself; if it happens again the machine "
        "computes wrongly: test its memory, use the same torch as the others, or drain it: "
        f"atoll drain {job.node_of(member)}",
    )


def _running(facts: Facts) -> Iterator[JobFacts]:
    return (job for job in facts.jobs if job.state == JobState.RUNNING)


def _present(job: JobFacts, rounds: int) -> list[str]:
    newest = job.rounds[-rounds:]
    return [
        member
        for member, known in job.members.items()
        if known.state == MemberState.RUNNING
        and len(newest) == rounds
        and len(job.rows_of(member, rounds)) == rounds
    ]
