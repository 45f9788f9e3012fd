"""One attempt of a round: from its plan to its verdict."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from atoll.errors import EpochChanged, GroupError
from atoll.ids import slot_of
from atoll.rounds.effects import MemberDropped
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote

SLACK_S = 15.0
"""Time for votes to arrive, beyond one and a half times the limit of the reduce."""


@dataclass
class Attempt:
    """An attempt without a verdict."""

    plan: RoundPlan
    planned_at: float
    joins: dict[str, RoundJoin] = field(default_factory=dict)
    """Reports of its members, at their join or newer; empty after a restart of the hub."""
    votes: dict[str, RoundVote] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Members that are no longer waited for, whether or not they voted."""
    against: set[str] = field(default_factory=set)
    """Members whose vote is against it."""

    def __post_init__(self) -> None:
        # With thousands of members a vote must not scan all of them.
        self.members = frozenset(self.plan.members)
        self._missing = set(self.members) - self.left - self.votes.keys()
        self._named: list[str] = self.plan.members
        """Contributors of the last vote, all of them members."""

    def attends(self, member: str) -> bool:
        """Return whether a member takes part and is still waited for."""
        return member in self.members and member not in self.left

    @property
    def waits(self) -> bool:
        """Whether a member still has to vote."""
        return bool(self._missing)

    def missing(self) -> list[str]:
        """Return the members that still have to vote, in slot order."""
        return sorted(self._missing, key=slot_of)

    def hopeless(self, voted_against: Container[str]) -> bool:
        """Return whether no missing vote can prevent its abort.

        A member that votes against may have contributed nothing, and the others would wait for it
        until the time limit. One that also voted against the last attempt does not decide alone: it
        could otherwise block the others forever.
        """
        return any(m not in voted_against for m in self.against - self.left)

    def overdue(self, now: float) -> bool:
        """Return whether the time for votes is over."""
        return now >= self.planned_at + 1.5 * self.plan.timeout_s + SLACK_S

    def counted(self) -> dict[str, RoundVote]:
        """Return the votes that count, in slot order."""
        here = self.votes.keys() - self.left
        return {m: self.votes[m] for m in self.plan.members if m in here}

    def take(self, member: str, vote: RoundVote) -> None:
        """Record a member's first vote, even if the member was considered lost.

        Raises:
            GroupError: the vote contradicts the plan.
        """
        plan = self.plan
        # Nearly all votes name the same members, which are not looked up again.
        if not any(vote.contributors is one for one in (plan.members, self._named)):
            known = vote.contributors == self._named or self.members.issuperset(vote.contributors)
            self._named = vote.contributors if known else self._named
        else:
            known = True
        if vote.round != plan.round or not known:
            raise GroupError(
                "this vote does not belong to its attempt",
                given=f"round {vote.round} with {', '.join(vote.contributors) or 'no members'}",
                expected=f"round {plan.round} with members of {', '.join(plan.members)}",
            )
        self.left.discard(member)
        self._missing.discard(member)
        if not self.votes.setdefault(member, vote).ok:
            self.against.add(member)

    def leave(self, member: str, *, tell_members: bool = True) -> list[MemberDropped]:
        """Stop waiting for a member; return the notice for the others."""
        if not self.attends(member):
            return []
        self.left.add(member)
        self._missing.discard(member)
        return [MemberDropped(self.plan, member, tell_members)]


def not_open(epoch: int, attempt: Attempt | None) -> EpochChanged:
    """Return the error for a vote on an attempt that is not the open one."""
    return EpochChanged(
        "this attempt of a round is not open",
        given=f"epoch {epoch}",
        expected=f"epoch {attempt.plan.epoch}" if attempt else "none is open",
        remedy="join the round again",
    )
