"""From the votes on an attempt to its one verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

from atoll.ids import slot_of
from atoll.wire.messages import RoundPlan, RoundVote, Verdict

DIFFERENT = "members hold different results"
ODD = "its result differs from that of the others"


def majority_base(bases: Mapping[str, str]) -> str:
    """Return the digest that most members stand on; in a tie, that of the lowest slot."""
    counts = Counter(bases.values())
    most = max(counts.values())
    return next(bases[m] for m in sorted(bases, key=slot_of) if counts[bases[m]] == most)


def odd_ones(votes: Mapping[str, RoundVote]) -> list[str]:
    """Return those that hold another result than more than half of all who voted well.

    They are left out and take over the state of the others. Without such a majority nobody is odd,
    and the attempt is aborted.
    """
    results = {m: (v.digest, tuple(v.contributors)) for m, v in votes.items() if v.ok}
    if not results:
        return []
    result, count = Counter(results.values()).most_common(1)[0]
    return [m for m in results if results[m] != result] if 2 * count > len(results) else []


def outvoted(votes: Mapping[str, RoundVote], unwell: Container[str]) -> dict[str, str]:
    """Return who is left out of the verdict though it voted, and why.

    Nobody may hold up the others twice: whoever voted against the last attempt of the round, too,
    does not count beside others that hold a result, nor does one whose result is odd.

    Args:
        votes: Votes that count so far.
        unwell: Who voted against the last attempt of this round.
    """
    out: dict[str, str] = {}
    if any(vote.ok for vote in votes.values()):
        again = [m for m, vote in votes.items() if not vote.ok and m in unwell]
        out = {m: votes[m].reason or "not ok twice" for m in again}
    return out | dict.fromkeys(odd_ones(votes), ODD)


def judge(
    plan: RoundPlan, votes: Mapping[str, RoundVote], left: Iterable[str], *, least: int = 0
) -> Verdict:
    """Return the verdict on an attempt: all remaining votes are ok and agree, or it is aborted.

    Args:
        plan: The attempt.
        votes: What each member voted.
        left: Members that no longer count, whether they voted or not.
        least: With fewer members the run pauses: nothing is committed by what is left of them.
    """
    counted = {m: votes[m] for m in plan.members if m in votes and m not in set(left)}
    unwell = [f"{m}: {vote.reason or 'not ok'}" for m, vote in counted.items() if not vote.ok]
    results = {(vote.digest, tuple(vote.contributors)) for vote in counted.values()}
    if not counted:
        reason = "every member was lost before it voted"
    elif unwell:
        reason = "; ".join(unwell)
    elif len(results) > 1:
        reason = f"{DIFFERENT}: " + ", ".join(
            f"{m} {vote.digest[:8]}" for m, vote in counted.items()
        )
    else:
        first = next(iter(counted.values()))
        there = max(len(counted), len(first.contributors))
        if there >= least:
            return Verdict(plan.round, plan.epoch, True, first.digest, first.contributors)
        reason = f"{there} of at least {least} members are left"
    return Verdict(plan.round, plan.epoch, False, reason=reason)
