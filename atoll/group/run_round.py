"""The whole transaction of a round: join, reduce, commit; again, with the same values, on abort."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.errors import (
    AtollError,
    DeadlineExceeded,
    EpochChanged,
    GroupError,
    LeftBehind,
    PeerLost,
    PeerRefused,
)
from atoll.group.base import Decidable, Group, Reduced, Resting
from atoll.wire.messages import Lease, MemberStats, RoundPlan, Verdict

log = logging.getLogger(__name__)

STALLED_S = 300.0
"""Give up after this long without a commit and without any change of the members."""
ATTEMPTS = 8
"""Never give up before so many attempts with the same members."""
LONGEST_PAUSE_S = 2.0

_AGAIN = (PeerLost, PeerRefused, EpochChanged, DeadlineExceeded)
"""Errors after which the same values are worth another attempt."""


T = TypeVar("T", bound=Decidable)


@dataclass(frozen=True)  # with slots, Python 3.11 cannot make instances of `Transacted[Reduced]`
class CommittedRound(Generic[T]):
    """A committed round."""

    reduced: T
    """What its exchanges came to."""
    plan: RoundPlan
    verdict: Verdict
    seconds: dict[str, float]
    """Seconds spent in `join`, `reduce` and `commit`, over all attempts."""
    attempts: int
    sent_bytes: int
    """Bytes over all attempts."""
    received_bytes: int
    lease: Lease | None = None
    """What this member trains on until the next round; None: as before."""
    pace: float = 1.0
    """Share of a period's steps that this member does until the next round."""


Agreed = CommittedRound[Reduced]
"""A committed round of one mean."""


def agree(
    group: Group,
    xs: Sequence[Tensor],
    *,
    codec: Codec,
    weight: float,
    base: str,
    round_: int,
    key: str = "x",
    tokens: int = 0,
    steps: int = 0,
    busy_s: float = 0.0,
    lease: Lease | None = None,
    account: MemberStats | None = None,
    resting: Resting = nullcontext,
    stalled_s: float = STALLED_S,
    clock: Clock | None = None,
) -> Agreed:
    """Return the mean that all members committed in this round.

    An attempt that fails because somebody went away is made again with the same values, so that
    no work is lost. The caller applies the result only after this returns. Members may come and go
    as often as they like; only a group that stays the same and still cannot commit is given up.

    Args:
        group: The members.
        xs: Values of this member.
        codec: How they are encoded on the wire.
        weight: Weight of this member's values.
        base: Digest of the committed state this member stands on.
        round_: The round; must be `group.committed_round`.
        key: Names the codec's residual state.
        tokens: Tokens trained in all, for the record.
        steps: Optimizer steps of this member since the last round.
        busy_s: Seconds they took.
        lease: Where this member's data stands now.
        account: What people should know of the period; decides nothing.
        resting: Surrounds every wait: others may read the state meanwhile.
        stalled_s: How long to try without any change of the members.
        clock: Source of time for the seconds.

    Raises:
        LeftBehind: the others committed without this member; it has to recover.
        GroupLeft: this member leaves.
        GroupError: no attempt was committed, or this member does not fit the others.
    """

    def mean(_: RoundPlan) -> Reduced:
        work = group.reduce(xs, codec=codec, weight=weight, key=key)
        with resting():
            return work.wait()

    return run_round(
        group, mean, base=base, round_=round_, tokens=tokens, steps=steps, busy_s=busy_s,
        lease=lease, account=account, resting=resting, stalled_s=stalled_s, clock=clock,
    )  # fmt: skip


def run_round(
    group: Group,
    exchange: Callable[[RoundPlan], T],
    *,
    base: str,
    round_: int,
    tokens: int = 0,
    steps: int = 0,
    busy_s: float = 0.0,
    lease: Lease | None = None,
    account: MemberStats | None = None,
    resting: Resting = nullcontext,
    stalled_s: float = STALLED_S,
    clock: Clock | None = None,
) -> CommittedRound[T]:
    """Return what all members committed in this round, whatever they exchange in it.

    Args:
        group: The members.
        exchange: Reduces and swaps with the members of a plan; waits inside `resting`. It is called
            anew, with another plan, when an attempt was not committed, and MUST NOT change state.
        base: Digest of the committed state this member stands on.
        round_: The round; must be `group.committed_round`.
        tokens: As in :func:`agree`.
        steps: As in :func:`agree`.
        busy_s: As in :func:`agree`.
        lease: As in :func:`agree`.
        account: As in :func:`agree`.
        resting: As in :func:`agree`.
        stalled_s: As in :func:`agree`.
        clock: As in :func:`agree`.

    Raises:
        LeftBehind: the others committed without this member; it has to recover.
        GroupLeft: this member leaves.
        GroupError: no attempt was committed, or this member does not fit the others.
    """
    attempts = _Attempts(clock if clock is not None else RealClock(), stalled_s)
    sent, received = group.sent_bytes, group.received_bytes
    while True:
        attempts.begin("join")
        with resting():
            plan = group.join(
                round_, base=base, tokens=tokens, steps=steps, busy_s=busy_s, lease=lease,
                account=account,
            )  # fmt: skip
        attempts.begin("reduce")
        reduced, trouble = _exchanged(exchange, plan)
        attempts.begin("commit")
        reason = str(trouble) if trouble is not None else ""
        try:
            verdict = _commit(group, plan, reduced, reason=reason, lease=lease, resting=resting)
        except LeftBehind:
            if trouble is None or isinstance(trouble, _AGAIN):
                raise
            raise trouble from None  # to recover would not help: the next round ends the same way
        attempts.begin("")
        if trouble is not None and not isinstance(trouble, _AGAIN):
            raise trouble
        if verdict.committed and reduced is not None:
            return CommittedRound(
                reduced, plan, verdict, attempts.seconds, attempts.number,
                group.sent_bytes - sent, group.received_bytes - received,
                verdict.leases.get(group.me), verdict.pace.get(group.me, 1.0),
            )  # fmt: skip
        pause_s = attempts.failed(plan, verdict.reason or reason)
        if pause_s:
            with resting():
                threading.Event().wait(pause_s)


@dataclass(slots=True)
class _Attempts:
    """How often a round was tried, with whom, and where the time went."""

    clock: Clock
    stalled_s: float
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("join", "reduce", "commit"), 0.0)
    )
    number: int = 1
    _phase: str = ""
    _since: float = 0.0
    _members: list[str] = field(default_factory=list)
    _same: int = 0
    _changed: float = 0.0

    def begin(self, phase: str) -> None:
        """Count the time since the last call for the phase that ends now."""
        now = self.clock.monotonic()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def failed(self, plan: RoundPlan, reason: str) -> float:
        """Note an attempt that was not committed; return the seconds to wait before the next.

        Raises:
            GroupError: the same members have tried for too long.
        """
        log.warning("round %s, epoch %s was not committed: %s", plan.round, plan.epoch, reason)
        now = self.clock.monotonic()
        if plan.members != self._members:
            self._members, self._same, self._changed = plan.members, 0, now
        self._same += 1
        if self._same >= ATTEMPTS and now - self._changed >= self.stalled_s:
            raise GroupError(
                f"round {plan.round} was not committed",
                given=f"{self._same} attempts of the same {len(plan.members)} members "
                f"in {now - self._changed:.0f} s; the last: {reason}",
                remedy="look at the events of the job for what keeps them from agreeing",
            )
        self.number += 1
        return 0.0 if self._same == 1 else min(LONGEST_PAUSE_S, 0.05 * 2.0**self._same)


def _exchanged(
    exchange: Callable[[RoundPlan], T], plan: RoundPlan
) -> tuple[T | None, AtollError | None]:
    """Return the result, or what went wrong."""
    try:
        return exchange(plan), None
    except AtollError as error:
        return None, error


def _commit(
    group: Group,
    plan: RoundPlan,
    reduced: Decidable | None,
    *,
    reason: str,
    lease: Lease | None,
    resting: Resting,
) -> Verdict:
    """Return the verdict; an attempt that the hub has forgotten counts as aborted."""
    try:
        return group.commit(
            reduced, ok=reduced is not None, reason=reason, lease=lease, resting=resting
        )
    except EpochChanged as error:
        return Verdict(round=plan.round, epoch=plan.epoch, committed=False, reason=str(error))
