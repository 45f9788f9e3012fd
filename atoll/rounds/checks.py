"""From the votes on an attempt to its one verdict.

Who may be in a round, and what happens when the record is behind its members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from atoll.errors import LeftBehind
from atoll.ids import slot_of
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict

DIFFERENT = "members hold different results"
ODD = "its result differs from that of the others"


def majority_base(bases: Mapping[str, str]) -> str:
    """Return the digest of most members; in a tie, that of the lowest slot."""
    counts = Counter(bases.values())
    most = max(counts.values())
    return next(bases[m] for m in sorted(bases, key=slot_of) if counts[bases[m]] == most)


def outliers(votes: Mapping[str, RoundVote]) -> list[str]:
    """Return the members with another result than the majority of those that have one.

    They are left out and take over the state of the others. Without a majority there is no outlier,
    and the attempt is aborted.
    """
    results = {m: (v.digest, tuple(v.contributors)) for m, v in votes.items() if v.ok}
    if not results:
        return []
    result, count = Counter(results.values()).most_common(1)[0]
    return [m for m in results if results[m] != result] if 2 * count > len(results) else []


def minority(votes: Mapping[str, RoundVote], voted_against: Container[str]) -> dict[str, str]:
    """Return the voters that are left out of the verdict, and why.

    No member may hold up the others twice: one that voted against the last attempt of the round too
    does not count beside others that have a result; nor does an outlier.

    Args:
        votes: Votes that count so far.
        voted_against: Members that voted against the last attempt of this round.
    """
    out: dict[str, str] = {}
    if any(vote.ok for vote in votes.values()):
        again = [m for m, vote in votes.items() if not vote.ok and m in voted_against]
        out = {m: votes[m].reason or "not ok twice" for m in again}
    return out | dict.fromkeys(outliers(votes), ODD)


def tally(
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
    against = [f"{m}: {vote.reason or 'not ok'}" for m, vote in counted.items() if not vote.ok]
    results = {(vote.digest, tuple(vote.contributors)) for vote in counted.values()}
    if not counted:
        reason = "every member was lost before it voted"
    elif against:
        reason = "; ".join(against)
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


LEAVING, RECOVERING = "this member is leaving", "this member takes over the state"
"""Why a wait in a join ended though there was no fault."""


@dataclass(frozen=True)
class AheadOfHub:
    """Members that are on a later round than the record, as after a restore of an older file."""

    round: int
    base: str
    members: tuple[str, ...]


def ahead_of(joins: Mapping[str, RoundJoin], committed_round: int) -> AheadOfHub | None:
    """Return the state that the members which joined later rounds agree on.

    That is the majority's state, or its successor if only some members received the last verdict
    before the hub was lost. A claim of a later round proves nothing.
    """
    later = {m: (j.round, j.base) for m, j in joins.items() if j.round > committed_round}
    if not later:
        return None
    counts = Counter(later.values())

    def rank(place: tuple[int, str]) -> tuple[int, int, str]:
        return counts[place], *place

    usual = max(counts, key=rank)
    next_ones = [place for place in counts if place[0] == usual[0] + 1]
    place = max(next_ones, key=rank) if next_ones else usual
    members = sorted((m for m in later if later[m] == place), key=slot_of)
    return AheadOfHub(*place, tuple(members))


def shortage(count: int, least: int) -> str:
    """Return why a run with `count` members pauses, or nothing if that is enough."""
    return "" if count >= least else f"{count} of at least {least} members"


def is_behind(round_: int, committed_round: int) -> LeftBehind:
    """Return the error for a member that wants a round which is not the next one."""
    late = round_ < committed_round
    return LeftBehind(
        "the group went on without this member" if late else "this round is not the next one",
        given=f"round {round_}",
        expected=f"committed round {committed_round}",
        remedy="take over the committed state and join again",
    )


def differs(base: str, group: str, committed_round: int) -> LeftBehind:
    """Return the error for a member whose replica is not that of the group."""
    return LeftBehind(
        "your replica differs from that of the group",
        given=f"digest {base[:16]}",
        expected=f"{group[:16]} after committed round {committed_round}",
        remedy="take over the committed state and join again",
    )


def diverged_history(base: str, committed_round: int) -> LeftBehind:
    """Return the error for a member that comes from before the run was set back."""
    return LeftBehind(
        "the run was set back while this member was away",
        given=f"digest {base[:16]}",
        expected=f"the state after committed round {committed_round} as it is now",
        remedy="take over the committed state and join again",
    )


def wrong_lease(wrong: str) -> LeftBehind:
    """Return the error for a member that trained on the data slot of another."""
    return LeftBehind(
        "this member trained on a stretch of the data that is not its own",
        given=wrong,
        expected="the stretch that the last verdict, or Sources, named",
        remedy="take over the committed state and join again",
    )
