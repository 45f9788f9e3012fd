"""One attempt of a round: from its plan to its verdict."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from atoll.errors import EpochChanged, GroupError
from atoll.rounds.effects import MemberDropped
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote

SLACK_S = 15.0
"""Time for votes to arrive, beyond one and a half times the limit of the reduce."""


@dataclass
class Attempt:
    """An attempt without a verdict."""

    plan: RoundPlan
    planned_at: float
    joins: Mapping[str, RoundJoin] = field(default_factory=dict)
    """Reports of its members at their join; empty after a restart of the hub."""
    votes: dict[str, RoundVote] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Members that are no longer waited for, whether or not they voted."""

    def attends(self, member: str) -> bool:
        """Return whether a member takes part and is still waited for."""
        return member in self.plan.members and member not in self.left

    def missing(self) -> list[str]:
        """Return the members that still have to vote."""
        return [m for m in self.plan.members if m not in self.left and m not in self.votes]

    def hopeless(self, voted_against: Container[str]) -> bool:
        """Return whether no missing vote can prevent its abort.

        A member that votes against may have contributed nothing, and the others would wait for it
        until the time limit. One that also voted against the last attempt does not decide alone: it
        could otherwise block the others forever.
        """
        return any(not v.ok and m not in voted_against for m, v in self.counted().items())

    def overdue(self, now: float) -> bool:
        """Return whether the time for votes is over."""
        return now >= self.planned_at + 1.5 * self.plan.timeout_s + SLACK_S

    def counted(self) -> dict[str, RoundVote]:
        """Return the votes that count, in slot order."""
        return {m: self.votes[m] for m in self.plan.members if m in self.votes.keys() - self.left}

    def take(self, member: str, vote: RoundVote) -> None:
        """Record a member's first vote, even if the member was considered lost.

        Raises:
            GroupError: the vote contradicts the plan.
        """
        plan = self.plan
        if vote.round != plan.round or not set(vote.contributors) <= set(plan.members):
            raise GroupError(
                "this vote does not belong to its attempt",
                given=f"round {vote.round} with {', '.join(vote.contributors) or 'no members'}",
                expected=f"round {plan.round} with members of {', '.join(plan.members)}",
            )
        self.left.discard(member)
        self.votes.setdefault(member, vote)

    def leave(self, member: str, *, tell_members: bool = True) -> list[MemberDropped]:
        """Stop waiting for a member; return the notice for the others."""
        if not self.attends(member):
            return []
        self.left.add(member)
        return [MemberDropped(self.plan, member, tell_members)]


def not_open(epoch: int, attempt: Attempt | None) -> EpochChanged:
    """Return the error for a vote on an attempt that is not the open one."""
    return EpochChanged(
        "this attempt of a round is not open",
        given=f"epoch {epoch}",
        expected=f"epoch {attempt.plan.epoch}" if attempt else "none is open",
        remedy="join the round again",
    )
