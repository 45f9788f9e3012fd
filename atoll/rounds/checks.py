"""Checks of joins and votes: who may take part, and the verdict that follows from the votes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from atoll.errors import LeftBehind
from atoll.ids import slot_of
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict

DIFFERENT = "members hold different results"
BEHIND = "the group continued without this member"
ODD = "its result differs from that of the others"

LONGEST_REASON = 500
"""Characters kept of a member's reason to vote against a round. They are sent to all members in the
verdict; if that did not fit into a frame, the round would never end."""


def majority_base(bases: Mapping[str, str]) -> str:
    """Return the digest of most members; in a tie, that of the lowest slot."""
    counts = Counter(bases.values())
    most = max(counts.values())
    return next(bases[m] for m in sorted(bases, key=slot_of) if counts[bases[m]] == most)


def outliers(votes: Mapping[str, RoundVote]) -> list[str]:
    """Return the members with another result than the majority of those that have one.

    They are left out and have to recover. Without a majority no member is an outlier, and the
    attempt is aborted.
    """
    results = _results({m: vote for m, vote in votes.items() if vote.ok})
    if not results:
        return []
    result, count = Counter(results.values()).most_common(1)[0]
    return [m for m in results if results[m] != result] if 2 * count > len(results) else []


def _results(votes: Mapping[str, RoundVote]) -> dict[str, int]:
    """Return the number of each voter's result: equal digests and contributors are one result.

    Contributors are compared only with those of other results, not hashed: with n members they are
    n lists of n names.
    """
    kinds: list[RoundVote] = []
    found: dict[str, int] = {}
    for member, vote in votes.items():
        for number, kind in enumerate(kinds):
            same = vote.contributors is kind.contributors or vote.contributors == kind.contributors
            if vote.digest == kind.digest and same:
                found[member] = number
                break
        else:
            found[member] = len(kinds)
            kinds.append(vote)
    return found


def minority(votes: Mapping[str, RoundVote], voted_against: Container[str]) -> dict[str, str]:
    """Return the voters left out of the verdict, outliers and repeated votes against, and why.

    A member in `voted_against` voted against the last attempt of this round, too; if others have a
    result, it must not block them a second time.
    """
    out: dict[str, str] = {}
    if any(vote.ok for vote in votes.values()):
        again = [m for m, vote in votes.items() if not vote.ok and m in voted_against]
        out = {m: votes[m].reason[:LONGEST_REASON] or "not ok twice" for m in again}
    return out | dict.fromkeys(outliers(votes), ODD)


def tally(
    plan: RoundPlan,
    votes: Mapping[str, RoundVote],
    left: Iterable[str],
    *,
    least: int = 0,
    whole: bool = False,
) -> Verdict:
    """Return the verdict: committed if all remaining votes are ok and agree, otherwise aborted.

    Votes of members in `left` do not count. With fewer than `least` members nothing is committed,
    and the run pauses. `whole`: nor is it if a member of the plan contributed nothing.
    """
    gone = set(left)
    counted = {m: votes[m] for m in plan.members if m in votes and m not in gone}
    against = [
        f"{m}: {vote.reason[:LONGEST_REASON] or 'not ok'}"
        for m, vote in counted.items() if not vote.ok
    ]  # fmt: skip
    results = set(_results(counted).values())
    if not counted:
        reason = "every member was lost before it voted"
    elif against:
        reason = "; ".join(against)[: 10 * LONGEST_REASON]
    elif len(results) > 1:
        reason = f"{DIFFERENT}: " + ", ".join(
            f"{m} {vote.digest[:8]}" for m, vote in counted.items()
        )
    else:
        first = next(iter(counted.values()))
        there = max(len(counted), len(first.contributors))
        missing = sorted(set(plan.members) - set(first.contributors), key=slot_of) if whole else []
        if there >= least and not missing:
            return Verdict(
                plan.round, plan.epoch, True, first.digest, first.contributors, group=plan.group
            )
        reason = f"{there} of at least {least} members are left"
        if missing:
            reason = f"without the contribution of {', '.join(missing)}"
    return Verdict(plan.round, plan.epoch, False, reason=reason, group=plan.group)


LEAVING, RECOVERING = "this member is leaving", "this member takes over the state"
"""Reasons why a join may end without a fault."""


@dataclass(frozen=True)
class AheadOfHub:
    """Members on a later round than the record, e.g. after an older database was restored."""

    round: int
    base: str
    members: tuple[str, ...]


def ahead_of(joins: Mapping[str, RoundJoin], committed_round: int) -> AheadOfHub | None:
    """Return the state on which the members that joined later rounds agree, or None.

    It is the majority's state, or its successor if only some members received the last verdict
    before the hub was lost. A single member's claim of a later round proves nothing.
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
    """Return why a run with `count` members pauses, or an empty text."""
    return "" if count >= least else f"{count} of at least {least} members"


def is_behind(round_: int, committed_round: int) -> LeftBehind:
    """Return the error for a join of another round than the next one."""
    late = round_ < committed_round
    return LeftBehind(
        BEHIND if late else "this round is not the next one",
        given=f"round {round_}",
        expected=f"committed round {committed_round}",
        remedy="take over the committed state and join again",
    )


def differs(base: str, group: str, committed_round: int) -> LeftBehind:
    """Return the error for a member with another committed state than the group."""
    return LeftBehind(
        "your replica differs from that of the group",
        given=f"digest {base[:16]}",
        expected=f"{group[:16]} after committed round {committed_round}",
        remedy="take over the committed state and join again",
    )


def diverged_history(base: str, committed_round: int) -> LeftBehind:
    """Return the error for a member from before the run was reset."""
    return LeftBehind(
        "the run was set back while this member was away",
        given=f"digest {base[:16]}",
        expected=f"the state after committed round {committed_round} as it is now",
        remedy="take over the committed state and join again",
    )


def wrong_lease(wrong: str) -> LeftBehind:
    """Return the error for a member that trained on another member's data slot."""
    return LeftBehind(
        "this member trained on data that is not assigned to it",
        given=wrong,
        expected="the data assigned by the last verdict, or by Sources",
        remedy="take over the committed state and join again",
    )
