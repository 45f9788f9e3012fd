"""Groups inside one process: n members on n threads, for tests and for trying things out.

The semantics are those of the real thing: contributions are encoded by real codecs, the mean is
over the weights received and summed in member order, every member decodes the same bytes, and
there is one verdict per attempt. A member can be killed at every phase.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.codec import Codec
from atoll.codec.table import make_codec
from atoll.errors import (
    AtollError,
    ConfigError,
    DeadlineExceeded,
    EpochChanged,
    GroupError,
    LeftBehind,
    PeerLost,
)
from atoll.group.group import Group, Reduced, Work, flatten, unflatten
from atoll.ids import member_id
from atoll.reducer.mean import Mean, Share, mean_of, odd_ones, result_digest
from atoll.wire.messages import RoundPlan, Verdict

T = TypeVar("T")

PHASES = ("now", "join", "send", "sent", "commit")


@dataclass(slots=True)
class _Attempt:
    """One epoch: its plan and what came in."""

    plan: RoundPlan
    shares: dict[str, Share] = field(default_factory=dict)
    refused: dict[str, AtollError] = field(default_factory=dict)
    mean: Mean | None = None
    error: AtollError | None = None
    votes: dict[str, tuple[bool, str, str]] = field(default_factory=dict)
    verdict: Verdict | None = None


class MemoryGroups:
    """The table that the members of one process meet at."""

    def __init__(
        self, n: int, *, timeout_s: float = 30.0, ids: Sequence[str] | None = None
    ) -> None:
        """Make `n` members.

        Args:
            n: How many, >= 1.
            timeout_s: Longest wait in a join, a reduce or a commit.
            ids: Their names in member order; w0, w1, ... when left out.
        """
        names: list[str] = list(ids if ids is not None else map(member_id, range(n)))
        if n < 1 or len(names) != n or len(set(names)) != n:
            raise ConfigError(
                "a group needs one name per member", given=f"{n} members, {names}",
                expected="at least one member, all names different",
            )  # fmt: skip
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._order = names
        self._alive = set(names)
        self._doomed: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._strangers: set[str] = set()
        self._attempts: dict[int, _Attempt] = {}
        self._epoch = 0
        self._committed = 0
        self._stopping = False
        self._groups = [MemoryGroup(self, name) for name in names]

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[MemoryGroup]:
        return iter(self._groups)

    def __getitem__(self, index: int) -> MemoryGroup:
        return self._groups[index]

    def run(
        self, function: Callable[[Group], T], *, timeout_s: float = 60.0
    ) -> list[T | BaseException]:
        """Call `function(group)` on a thread per member; errors take the place of results."""
        work = [
            Work.start(lambda group=group: function(group), name=f"member-{group.me}")  # type: ignore[misc]
            for group in self._groups
        ]
        deadline = RealClock().monotonic() + timeout_s
        results: list[T | BaseException] = []
        for each in work:
            try:
                results.append(each.wait(max(0.0, deadline - RealClock().monotonic())))
            except BaseException as error:  # handed to the caller in place of the result
                results.append(error)
        return results

    def together(self, function: Callable[[Group], T], *, timeout_s: float = 60.0) -> list[T]:
        """Do what :meth:`run` does, and raise the first error."""
        results: list[T] = []
        for result in self.run(function, timeout_s=timeout_s):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def kill(self, member: str, *, at: str = "now") -> None:
        """Take a member away; from then on its own calls raise PeerLost.

        Args:
            member: Its name.
            at: `now`, or when it comes to `join`, `send` (before its contribution is there),
                `sent` (after) or `commit`.
        """
        if at not in PHASES or member not in self._order:
            raise ConfigError(
                "this member cannot be killed like that", given=f"{member} at {at}",
                expected=f"one of {self._order} at one of {PHASES}",
            )  # fmt: skip
        with self._changed:
            if at == "now":
                self._lose(member)
            else:
                self._doomed[member] = at

    def stop(self) -> None:
        """Let the next plan say that the job ends."""
        with self._changed:
            self._stopping = True

    def add(self, member: str | None = None) -> MemoryGroup:
        """Return a newcomer; the next plan waits for it too."""
        with self._changed:
            name = member if member is not None else member_id(len(self._order))
            if name in self._alive:
                raise ConfigError("a living member has this name", given=name)
            if name not in self._order:
                self._order.append(name)
            self._alive.add(name)
            group = MemoryGroup(self, name)
            group.committed_round = self._committed
            self._groups.append(group)
            return group

    # ------------------------------------------------------------ what members call

    def _enter(self, member: str, phase: str) -> None:
        """Kill the member here if that was asked for; the condition is held."""
        if self._doomed.get(member) == phase:
            self._lose(member)
        if member not in self._alive:
            raise PeerLost("this member was killed", given=member)

    def _lose(self, member: str) -> None:
        self._alive.discard(member)
        self._doomed.pop(member, None)
        self._waiting.pop(member, None)
        self._open_if_all_wait()
        for attempt in self._attempts.values():
            self._compute_if_complete(attempt)
            self._decide_if_voted(attempt)
        self._changed.notify_all()

    def _wait(self, member: str, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait with the condition held until `ready`, or until the member is killed."""
        if not self._changed.wait_for(lambda: ready() or member not in self._alive, timeout_s):
            raise DeadlineExceeded(f"{what} took too long", given=f"{timeout_s:.1f} s")
        if member not in self._alive:
            raise PeerLost("this member was killed", given=member)

    def join(self, member: str, round_: int, base: str, timeout_s: float) -> _Attempt:
        """Wait for all living members and return the attempt they are in."""
        with self._changed:
            self._enter(member, "join")
            if round_ != self._committed:
                raise (LeftBehind if round_ < self._committed else GroupError)(
                    "this is not the next round",
                    given=f"round {round_}", expected=f"committed round {self._committed}",
                )  # fmt: skip
            last = self._attempts.get(self._epoch)
            if last is not None and last.verdict is None and member in last.plan.members:
                return last
            before = self._epoch
            self._strangers.discard(member)
            self._waiting[member] = base
            self._open_if_all_wait()

            def planned() -> bool:
                return member in self._strangers or any(
                    member in self._attempts[epoch].plan.members
                    for epoch in range(before + 1, self._epoch + 1)
                )

            try:
                self._wait(member, planned, "joining the round", timeout_s)
            finally:
                self._waiting.pop(member, None)
            if member in self._strangers:
                raise LeftBehind("this member stands on another state", given=base)
            return self._attempts[self._epoch]

    def _open_if_all_wait(self) -> None:
        if not self._alive or set(self._waiting) < self._alive:
            return
        members = [name for name in self._order if name in self._alive]
        bases = {self._waiting[name] for name in members}
        if len(bases) > 1:
            # Who stands on another state than the first member has to heal first.
            right = self._waiting[members[0]]
            self._strangers |= {name for name in members if self._waiting[name] != right}
            members = [name for name in members if name not in self._strangers]
        self._epoch += 1
        plan = RoundPlan(
            job="memory", round=self._committed, epoch=self._epoch, members=members,
            route="alone" if len(members) == 1 else "relay", timeout_s=self.timeout_s,
            stopping=self._stopping,
        )  # fmt: skip
        self._attempts[self._epoch] = _Attempt(plan)
        self._attempts.pop(self._epoch - 8, None)
        self._waiting.clear()
        self._changed.notify_all()

    def contribute(self, attempt: _Attempt, share: Share, timeout_s: float) -> Mean:
        """Hand in a contribution and return the mean when all that live are in."""
        with self._changed:
            self._enter(share.member, "send")
            attempt.shares.setdefault(share.member, share)
            self._compute_if_complete(attempt)
            self._enter(share.member, "sent")
            self._wait(
                share.member, lambda: attempt.mean is not None or attempt.error is not None,
                "the reduce", timeout_s,
            )  # fmt: skip
            if attempt.error is not None:
                raise attempt.error
            if share.member in attempt.refused:
                raise attempt.refused[share.member]
            if attempt.mean is None:
                raise GroupError("the reduce ended without a result")
            return attempt.mean

    def _compute_if_complete(self, attempt: _Attempt) -> None:
        living = [name for name in attempt.plan.members if name in self._alive]
        if attempt.mean is not None or attempt.error is not None or not attempt.shares:
            return
        if any(name not in attempt.shares for name in living):
            return
        shares = [attempt.shares[m] for m in attempt.plan.members if m in attempt.shares]
        attempt.refused = odd_ones(shares)
        shares = [share for share in shares if share.member not in attempt.refused]
        try:
            attempt.mean = mean_of(shares, codec=make_codec(shares[0].packet.codec))
        except AtollError as error:
            attempt.error = error
        self._changed.notify_all()

    def vote(self, attempt: _Attempt, member: str, vote: tuple[bool, str, str]) -> Verdict:
        """Hand in a vote (ok, digest, reason) and return the verdict of all."""
        with self._changed:
            self._enter(member, "commit")
            attempt.votes.setdefault(member, vote)
            self._decide_if_voted(attempt)
            try:
                self._wait(member, lambda: attempt.verdict is not None, "the vote", self.timeout_s)
            except DeadlineExceeded:
                self._decide(attempt)  # who has not voted by now is left out
            if attempt.verdict is None:
                raise EpochChanged("this attempt has no verdict", given=attempt.plan.epoch)
            return attempt.verdict

    def _decide_if_voted(self, attempt: _Attempt) -> None:
        living = [name for name in attempt.plan.members if name in self._alive]
        if living and all(name in attempt.votes for name in living):
            self._decide(attempt)

    def _decide(self, attempt: _Attempt) -> None:
        if attempt.verdict is not None:
            return
        votes = {name: vote for name, vote in attempt.votes.items() if name in self._alive}
        against = next((reason for ok, _, reason in votes.values() if not ok), "")
        digests = {digest for _, digest, _ in votes.values()}
        committed = all(ok for ok, _, _ in votes.values()) and len(digests) == 1
        if not committed and not against:
            against = "the members' results differ"
        attempt.verdict = Verdict(
            round=attempt.plan.round, epoch=attempt.plan.epoch, committed=committed,
            digest=digests.pop() if committed else "", reason=against,
            contributors=list(attempt.mean.contributors) if committed and attempt.mean else [],
        )  # fmt: skip
        if committed:
            self._committed = attempt.plan.round + 1
        self._changed.notify_all()


class MemoryGroup:
    """One member's view of a :class:`MemoryGroups`; see :class:`atoll.group.group.Group`."""

    def __init__(self, table: MemoryGroups, me: str) -> None:
        """Belong to `table` as `me`."""
        self.me = me
        self.members: tuple[str, ...] = ()
        self.epoch = 0
        self.committed_round = 0
        self.stopping = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._table = table
        self._attempt: _Attempt | None = None
        self._codec: Codec | None = None

    def join(
        self, round_: int, *, base: str, tokens: int = 0, deadline: float | None = None
    ) -> RoundPlan:
        """Wait for all living members; see :meth:`Group.join`."""
        timeout_s = self._table.timeout_s
        if deadline is not None:
            timeout_s = max(0.0, deadline - RealClock().monotonic())
        self._attempt = attempt = self._table.join(self.me, round_, base, timeout_s)
        plan = attempt.plan
        self.members, self.epoch, self.stopping = tuple(plan.members), plan.epoch, plan.stopping
        return plan

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Begin the mean; see :meth:`Group.reduce`."""
        attempt = self._joined()
        shapes = [x.detach() for x in xs]
        if attempt.plan.route == "alone":
            from_me = flatten(xs)
            return Work.start(
                lambda: self._alone(attempt, from_me, shapes, weight), name=f"reduce-{self.me}"
            )
        self._codec = codec
        packet = codec.encode(flatten(xs), key=key)
        share = Share(self.me, packet, weight)
        return Work.start(lambda: self._exchange(attempt, share, shapes), name=f"reduce-{self.me}")

    def _alone(
        self, attempt: _Attempt, vector: Tensor, like: Sequence[Tensor], weight: float
    ) -> Reduced:
        share = Share(self.me, make_codec("fp32").encode(vector, key="alone"), weight or 1.0)
        self._table.contribute(attempt, share, self._table.timeout_s)
        return Reduced(
            tensors=unflatten(vector, like), contributors=(self.me,), weight=weight,
            sent_bytes=0, received_bytes=0, digest="alone",
        )  # fmt: skip

    def _exchange(self, attempt: _Attempt, share: Share, like: Sequence[Tensor]) -> Reduced:
        mean = self._table.contribute(attempt, share, self._table.timeout_s)
        vector = make_codec(mean.packet.codec).decode(mean.packet)
        sent, received = len(share.packet.data), len(mean.packet.data)
        self.sent_bytes += sent
        self.received_bytes += received
        return Reduced(
            tensors=unflatten(vector, like), contributors=mean.contributors, weight=mean.weight,
            sent_bytes=sent, received_bytes=received,
            digest=result_digest(mean.packet.data, mean.contributors),
        )  # fmt: skip

    def commit(self, reduced: Reduced | None, *, ok: bool = True, reason: str = "") -> Verdict:
        """Vote and return the verdict; see :meth:`Group.commit`."""
        attempt = self._joined()
        ok = ok and reduced is not None
        digest = reduced.digest if reduced is not None else ""
        verdict = self._table.vote(attempt, self.me, (ok, digest, reason or "no result"))
        committed = verdict.committed and reduced is not None and verdict.digest == digest
        if self._codec is not None:
            self._codec.settle(committed=committed and self.me in verdict.contributors)
            self._codec = None
        if verdict.committed and not committed:
            raise LeftBehind(
                "the group committed a result that this member does not have",
                given=digest or "no result", expected=verdict.digest,
            )  # fmt: skip
        if committed:
            self.committed_round = verdict.round + 1
        return verdict

    def close(self) -> None:
        """Leave: the others wait for this member no more."""
        self._table.kill(self.me)

    def _joined(self) -> _Attempt:
        if self._attempt is None:
            raise GroupError("reduce and commit come after join", given="no plan")
        return self._attempt
