"""One round: join, reduce, commit; made again with the same values when it is aborted.

The three verbs are those of :class:`atoll.group.base.Group`. Nothing changes the model before the
verdict is there, so an aborted attempt costs time and no training.
"""

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
from atoll.group.period import PeriodReport
from atoll.wire.messages import Lease, RoundPlan, Verdict

log = logging.getLogger(__name__)

STALLED_S = 300.0
"""Give up after this long without a commit and without any change of the members."""
ATTEMPTS = 8
"""Never give up before so many attempts with the same members."""
LONGEST_PAUSE_S = 2.0

_AGAIN = (PeerLost, PeerRefused, EpochChanged, DeadlineExceeded)
"""Errors after which the same values are worth another attempt."""


T = TypeVar("T", bound=Decidable)

Exchange = Callable[[RoundPlan], T]
"""Reduces, or passes messages, between the members of a plan; returns the result.

It MUST NOT change state: it is called again, with another plan, when an attempt was aborted.
"""


@dataclass(frozen=True)  # with slots, Python 3.11 cannot make instances of `CommittedRound[T]`
class CommittedRound(Generic[T]):
    """A committed round."""

    reduced: T
    """The result of its exchange."""
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


CommittedMean = CommittedRound[Reduced]
"""A committed round of one mean."""


def run_round(
    group: Group,
    exchange: Exchange[T],
    report: PeriodReport,
    *,
    resting: Resting = nullcontext,
    stalled_s: float = STALLED_S,
    clock: Clock | None = None,
) -> CommittedRound[T]:
    """Return the round that all members committed.

    An attempt that fails because a member went away is made again with the same values. Members may
    come and go any number of times; only a group that stays the same and still cannot commit gives
    up. The caller applies the result after this returns.

    Args:
        group: The members.
        exchange: Computes the result with the members of a plan, e.g. :func:`mean_exchange`.
        report: The period that ends with this round.
        resting: Surrounds each wait: others may read the state meanwhile.
        stalled_s: How long to try without any change of the members.
        clock: Source of time for the seconds.

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
            plan = group.join(report)

        attempts.begin("reduce")
        reduced, trouble = _reduce(exchange, plan)

        # A member without a result votes too: the others learn at once that this attempt is lost
        # instead of waiting for its vote.
        attempts.begin("commit")
        reason = str(trouble) if trouble is not None else ""
        try:
            verdict = _commit(group, plan, reduced, reason, report.lease, resting)
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
        # The first repetition is immediate (a lost member explains the abort); later ones back off.
        pause_s = attempts.failed(plan, verdict.reason or reason)
        if pause_s:
            with resting():
                threading.Event().wait(pause_s)


def mean_exchange(
    group: Group,
    xs: Sequence[Tensor],
    *,
    codec: Codec,
    weight: float,
    key: str = "x",
    resting: Resting = nullcontext,
) -> Exchange[Reduced]:
    """Return the exchange that is one weighted mean of `xs`; see :meth:`Group.reduce`."""

    def mean(_: RoundPlan) -> Reduced:
        work = group.reduce(xs, codec=codec, weight=weight, key=key)
        with resting():
            return work.wait()

    return mean


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


def _reduce(exchange: Exchange[T], plan: RoundPlan) -> tuple[T | None, AtollError | None]:
    """Return the result, or what went wrong."""
    try:
        return exchange(plan), None
    except AtollError as error:
        return None, error


def _commit(
    group: Group,
    plan: RoundPlan,
    reduced: Decidable | None,
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
