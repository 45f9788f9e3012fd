"""One round: join, reduce, commit; repeated with the same values when it is aborted.

The three calls are those of :class:`atoll.group.base.Group`. The model does not change before the
verdict, so an aborted attempt costs time but no training.
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
"""Give up after this time without a commit and without a change of the members."""
ATTEMPTS = 8
"""Minimum number of attempts with the same members before giving up."""
LONGEST_PAUSE_S = 2.0

_AGAIN = (PeerLost, PeerRefused, EpochChanged, DeadlineExceeded)
"""Errors after which the same values are tried again."""


T = TypeVar("T", bound=Decidable)

Exchange = Callable[[RoundPlan], T]
"""Exchanges values between the members of a plan and returns the result. It MUST NOT change state:
it is called again, with another plan, after an aborted attempt."""


@dataclass(frozen=True)  # with slots, Python 3.11 cannot make instances of `CommittedRound[T]`
class CommittedRound(Generic[T]):
    """A committed round."""

    reduced: T
    plan: RoundPlan
    verdict: Verdict
    seconds: dict[str, float]
    """Seconds spent in `join`, `reduce` and `commit`, over all attempts."""
    attempts: int
    sent_bytes: int
    """Over all attempts."""
    received_bytes: int
    lease: Lease | None = None
    """Data until the next round; None: unchanged."""
    pace: float = 1.0
    """Share of a period's steps for this member until the next round."""


CommittedMean = CommittedRound[Reduced]


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

    An attempt that fails because a member was lost is repeated with the same values. Members may
    join and leave any number of times; only an unchanged group that cannot commit gives up. The
    caller applies the result.

    Args:
        group: The members.
        exchange: Computes the result with the members of a plan, e.g. :func:`mean_exchange`.
        report: The period that ends with this round.
        resting: Surrounds each wait, during which other threads may read the state.
        stalled_s: Time limit without any change of the members.
        clock: Source of time for the seconds.

    Raises:
        LeftBehind: the others committed without this member, which has to recover.
        GroupLeft: this member leaves.
        GroupError: no attempt was committed, or this member's contribution is incompatible.
    """
    attempts = _Attempts(clock if clock is not None else RealClock(), stalled_s)
    sent, received = group.sent_bytes, group.received_bytes
    while True:
        attempts.begin("join")
        with resting():
            plan = group.join(report)

        attempts.begin("reduce")
        reduced, trouble = _reduce(exchange, plan)

        # Vote even without a result, so that the others learn at once that the attempt failed.
        attempts.begin("commit")
        reason = str(trouble) if trouble is not None else ""
        try:
            verdict = _commit(group, plan, reduced, reason, report.lease, resting)
        except LeftBehind:
            if trouble is None or isinstance(trouble, _AGAIN):
                raise
            raise trouble from None  # recovery would not help: the next round would fail, too
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
    """Return the exchange of one weighted mean of `xs`; see :meth:`Group.reduce`."""

    def mean(_: RoundPlan) -> Reduced:
        work = group.reduce(xs, codec=codec, weight=weight, key=key)
        with resting():
            return work.wait()

    return mean


@dataclass(slots=True)
class _Attempts:
    """Number, members and timing of the attempts of one round."""

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
        """Start a phase; adds the elapsed time to the previous one."""
        now = self.clock.monotonic()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def failed(self, plan: RoundPlan, reason: str) -> float:
        """Record an aborted attempt; return the seconds to wait before the next.

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
                remedy="see the job's events for the cause",
            )
        self.number += 1
        return 0.0 if self._same == 1 else min(LONGEST_PAUSE_S, 0.05 * 2.0**self._same)


def _reduce(exchange: Exchange[T], plan: RoundPlan) -> tuple[T | None, AtollError | None]:
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
    """Return the verdict; an attempt unknown to the hub counts as aborted."""
    try:
        return group.commit(
            reduced, ok=reduced is not None, reason=reason, lease=lease, resting=resting
        )
    except EpochChanged as error:
        return Verdict(round=plan.round, epoch=plan.epoch, committed=False, reason=str(error))
