"""A member's vote on an attempt of a round, and what the verdict means for it."""

from __future__ import annotations

from atoll.errors import LeftBehind
from atoll.group.base import Decidable
from atoll.wire.messages import Lease, RoundJoin, RoundPlan, RoundVote, Verdict


def vote_on(
    plan: RoundPlan, reduced: Decidable | None, *, ok: bool, reason: str, lease: Lease | None,
    report: RoundJoin | None = None, nbytes: int = 0,
) -> RoundVote:  # fmt: skip
    """Return the vote of a member with this result; without one it votes against."""
    ok = ok and reduced is not None
    return RoundVote(
        round=plan.round, epoch=plan.epoch, ok=ok, reason="" if ok else reason or "no result",
        digest=reduced.digest if reduced is not None else "",
        contributors=list(reduced.contributors) if reduced is not None else [],
        lease=lease, report=report, nbytes=nbytes,
    )  # fmt: skip


def agrees(verdict: Verdict, vote: RoundVote) -> bool:
    """Return whether the group committed the result that this member voted for."""
    return verdict.committed and vote.ok and verdict.digest == vote.digest


def check_not_left_behind(verdict: Verdict, vote: RoundVote) -> None:
    """Raise LeftBehind if the group committed a result that this member does not have."""
    if verdict.committed and not agrees(verdict, vote):
        raise LeftBehind(
            "the group committed a result that this member does not have",
            given=vote.digest or "no result", expected=verdict.digest,
        )  # fmt: skip
