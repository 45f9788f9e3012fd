"""What the members of one process meet at: the rules of a round, on a lock instead of a hub.

They are those of the hub's own state machine: one open plan at a time; live members are awaited,
recovering ones for a bounded time, gone ones not at all; one verdict per attempt, reached by those
that are left; whoever missed a committed round is refused until it has recovered.
"""

from __future__ import annotations

from collections import Counter

from atoll.errors import AtollError, DeadlineExceeded, EpochChanged, GroupError, LeftBehind
from atoll.group.in_process.attempt import Attempt, Exchange, Join, Vote, why_aborted
from atoll.group.in_process.members import MemoryRoster
from atoll.reducer.all_to_all import AllToAllMessages, Outgoing
from atoll.reducer.mean import Mean, Share
from atoll.wire.messages import Lease, MemberStats, RoundPlan, Verdict


class MemoryTable(MemoryRoster):
    """Members, plans and verdicts. Its methods may be called from any thread."""

    def _settle(self) -> None:
        """Do everything that follows from a change."""
        for attempt in self._attempts.values():
            attempt.compute_if_complete(self._memory)
            self._decide_if_voted(attempt)
        self._form()
        self._changed.notify_all()

    # ----------------------------------------------------------------------------- plans

    def join(
        self,
        member: str,
        round_: int,
        base: str,
        timeout_s: float | None,
        lease: Lease | None = None,
        account: MemberStats | None = None,
    ) -> Attempt:
        """Return the attempt that a member is in; without a time-out while the group is paused."""
        with self._changed:
            self._enter(member, "join")
            self._check_round(round_)
            self._standing[member] = "live"
            if self._attends(member):
                return self._attempts[self._epoch]
            self._refused.pop(member, None)
            self._joins[member] = Join(round_, base, lease, self._clock.monotonic(), account)
            self._stands.add(member)
            try:
                return self._planned(member, timeout_s)
            finally:
                self._joins.pop(member, None)

    def _check_round(self, round_: int) -> None:
        if round_ < self._committed:
            raise self._behind(round_)
        if round_ > self._committed:
            raise GroupError(
                "this is not the next round",
                given=f"round {round_}", expected=f"committed round {self._committed}",
            )  # fmt: skip

    def _planned(self, member: str, timeout_s: float | None) -> Attempt:
        """Wait for a plan with this member, forming it when its time has come."""
        began, before = self._clock.monotonic(), self._epoch
        while True:
            self._form()
            for epoch in range(before + 1, self._epoch + 1):
                if epoch in self._attempts and member in self._attempts[epoch].plan.members:
                    return self._attempts[epoch]  # it may be decided by now
            if member in self._refused:
                raise self._refused.pop(member)
            if member in self._ended:
                raise self._ended[member]
            waited_s = self._clock.monotonic() - began
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            if waited_s >= limit_s and not (self._paused and timeout_s is None):
                raise DeadlineExceeded("joining the round took too long", given=f"{limit_s:.1f} s")
            self._changed.wait(max(0.01, min(limit_s - waited_s, self._next_s())))

    def _next_s(self) -> float:
        """Return the seconds until somebody is awaited no longer."""
        if not self._joins:
            return self.timeout_s
        first, now = min(join.at for join in self._joins.values()), self._clock.monotonic()
        ends = [first + hold for hold in (self._grace_s, self._hold_s) if hold is not None]
        return min((end - now for end in ends if end > now), default=self.timeout_s)

    def _form(self) -> None:
        """Make a plan if none is open and nobody is awaited any more."""
        attempt = self._attempts.get(self._epoch)
        if (attempt is not None and attempt.verdict is None) or not self._joins:
            return
        self._refuse_late()
        if not self._joins:
            return
        waited_s = self._clock.monotonic() - min(join.at for join in self._joins.values())
        live = [m for m, standing in self._standing.items() if standing == "live"]
        lagging = [m for m in live if m not in self._joins]
        self._paused = len(live) < self._min_members
        if self._paused:
            return
        if lagging and (self._grace_s is None or waited_s < self._grace_s):
            return
        if "recovering" in self._standing.values() and waited_s < self._hold_s:
            return
        for member in lagging:
            self._standing[member] = "gone"
        self._refuse_different()
        self._paused = len(self._joins) < self._min_members
        if not self._paused:
            self._plan()

    def _refuse_late(self) -> None:
        """Refuse who waits for a round that was committed meanwhile."""
        for member, join in list(self._joins.items()):
            if join.round != self._committed:
                self._refuse(member, self._behind(join.round))

    def _refuse_different(self) -> None:
        """Refuse who stands on another state than most; in a tie the first member is right."""
        bases = {name: self._joins[name].base for name in self._order if name in self._joins}
        counts = Counter(bases.values())
        right = max(bases.values(), key=counts.__getitem__)
        for member, base in bases.items():
            if base != right:
                error = LeftBehind("this member stands on another state", given=base)
                self._refuse(member, error)

    def _refuse(self, member: str, error: AtollError) -> None:
        self._refused[member] = error
        self._standing[member] = "gone"
        self._stands.discard(member)
        self._joins.pop(member, None)
        self._changed.notify_all()

    def _plan(self) -> None:
        members = [name for name in self._order if name in self._joins]
        self._epoch += 1
        plan = RoundPlan(
            job="memory", round=self._committed, epoch=self._epoch, members=members,
            route="alone" if len(members) == 1 else "relay", timeout_s=self.timeout_s,
            stopping=self._stopping,
        )  # fmt: skip
        self._attempts[self._epoch] = Attempt(plan, dict(self._joins))
        self._attempts.pop(self._epoch - 8, None)
        self._joins.clear()
        self._changed.notify_all()

    # -------------------------------------------------------------------- contributions

    def contribute(self, attempt: Attempt, number: int, share: Share) -> Mean:
        """Hand in a contribution and return the mean when all that are left are in."""
        exchange = self._enter_exchange(attempt, number, share.member, share)
        if exchange.mean is None:
            raise EpochChanged("this attempt was aborted", given=attempt.plan.epoch)
        return exchange.mean

    def give(self, attempt: Attempt, number: int, gift: Outgoing) -> AllToAllMessages:
        """Hand in parcels and return everybody's when all that are left are in."""
        exchange = self._enter_exchange(attempt, number, gift.member, gift)
        if exchange.dealt is None:
            raise EpochChanged("this attempt was aborted", given=attempt.plan.epoch)
        return exchange.dealt

    def _enter_exchange(
        self, attempt: Attempt, number: int, member: str, item: Share | Outgoing
    ) -> Exchange:
        """Hand something in and wait until the exchange is over."""
        with self._changed:
            self._enter(member, "send")
            exchange = attempt.exchanges.setdefault(number, Exchange())
            if isinstance(item, Share):
                exchange.shares.setdefault(member, item)
            else:
                exchange.gifts.setdefault(member, item)
            attempt.compute_if_complete(self._memory)
            self._changed.notify_all()
            self._enter(member, "sent")
            self._wait(member, lambda: exchange.over or attempt.verdict is not None, "the exchange")
            if exchange.error is not None:
                raise exchange.error
            if member in exchange.refused:
                raise exchange.refused[member]
            return exchange

    # -------------------------------------------------------------------------- verdicts

    def vote(self, attempt: Attempt, member: str, vote: Vote) -> Verdict:
        """Hand in a vote and return the verdict of all."""
        with self._changed:
            self._enter(member, "commit")
            if attempt.verdict is None:
                if attempt.plan.epoch != self._epoch:
                    raise EpochChanged("this attempt is not open", given=attempt.plan.epoch)
                attempt.left.discard(member)
                self._standing[member] = "live"
                attempt.votes.setdefault(member, vote)
                self._settle()
            try:
                self._wait(member, lambda: attempt.verdict is not None, "the vote")
            except DeadlineExceeded:
                silent = set(attempt.plan.members) - attempt.votes.keys()
                for name in silent - attempt.left:
                    self._standing[name] = "gone"
                attempt.left |= silent
                self._settle()
            if attempt.verdict is None:
                raise EpochChanged("this attempt has no verdict", given=attempt.plan.epoch)
            return attempt.verdict

    def _decide_if_voted(self, attempt: Attempt) -> None:
        """Decide when all have voted, or when one vote is enough for an abort.

        Nobody holds up the others twice: who votes against a round again does not count.
        """
        if attempt.verdict is not None:
            return
        against = {name for name, vote in attempt.votes.items() if not vote.ok} - attempt.left
        if len(against) < len(attempt.plan.members) - len(attempt.left):
            attempt.left |= against & self._unwell
        awaited = [name for name in attempt.plan.members if name not in attempt.left]
        if against - attempt.left or all(name in attempt.votes for name in awaited):
            self._unwell = against
            self._decide(attempt, {m: attempt.votes[m] for m in awaited if m in attempt.votes})

    def _decide(self, attempt: Attempt, votes: dict[str, Vote]) -> None:
        plan = attempt.plan
        reason = why_aborted(votes)
        if reason:
            attempt.verdict = Verdict(plan.round, plan.epoch, committed=False, reason=reason)
            return
        self._committed, self._unwell = plan.round + 1, set()
        self._stands = {name for name in votes if self._standing[name] == "live"}
        contributors = list(next(iter(votes.values())).contributors)
        moved = {m: lease for m, lease in attempt.leases.items() if m in contributors}
        leases = self._leases.commit(moved, self._present())
        pace = {name: pace for name, pace in self.paces.items() if self._standing[name] != "gone"}
        digest = next(iter(votes.values())).digest
        attempt.verdict = Verdict(
            plan.round, plan.epoch, committed=True, digest=digest, contributors=contributors,
            leases=leases, pace=pace,
        )  # fmt: skip

    def _behind(self, round_: int) -> LeftBehind:
        return LeftBehind(
            "the group went on without this member",
            given=f"round {round_}", expected=f"committed round {self._committed}",
        )  # fmt: skip
