"""The whole transaction of a round: join, reduce, commit; again, with the same values, on abort."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.codec import Codec
from atoll.errors import AtollError, DeadlineExceeded, EpochChanged, GroupError, PeerLost
from atoll.group.group import Group, Reduced, Work
from atoll.wire.messages import RoundPlan, Verdict

log = logging.getLogger(__name__)

_AGAIN = (PeerLost, EpochChanged, DeadlineExceeded)
"""Errors after which the same values are worth another attempt."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """A committed round."""

    reduced: Reduced
    plan: RoundPlan
    verdict: Verdict
    seconds: dict[str, float]
    """Seconds spent in `join`, `reduce` and `commit`, over all attempts."""
    attempts: int
    sent_bytes: int
    """Bytes over all attempts."""
    received_bytes: int


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
    attempts: int = 8,
    clock: Clock | None = None,
) -> Agreed:
    """Return the mean that all members committed in this round.

    An attempt that fails because somebody went away is made again with the same values, so that
    no work is lost. The caller applies the result only after this returns.

    Args:
        group: The members.
        xs: Values of this member.
        codec: How they are encoded on the wire.
        weight: Weight of this member's values.
        base: Digest of the committed state this member stands on.
        round_: The round; must be `group.committed_round`.
        key: Names the codec's residual state.
        tokens: Tokens trained in all, for the record.
        attempts: How often to try before giving up.
        clock: Source of time for the seconds.

    Raises:
        LeftBehind: the others committed without this member; it has to heal.
        GroupError: no attempt was committed, or this member does not fit the others.
    """
    clock = clock if clock is not None else RealClock()
    seconds = {"join": 0.0, "reduce": 0.0, "commit": 0.0}
    sent, received = group.sent_bytes, group.received_bytes
    reason = ""
    for attempt in range(1, attempts + 1):
        began = clock.monotonic()
        plan = group.join(round_, base=base, tokens=tokens)
        joined = clock.monotonic()
        seconds["join"] += joined - began
        reduced, trouble = _reduce(group, xs, codec=codec, weight=weight, key=key)
        ended = clock.monotonic()
        seconds["reduce"] += ended - joined
        reason = str(trouble) if trouble is not None else ""
        verdict = _commit(group, plan, reduced, reason)
        seconds["commit"] += clock.monotonic() - ended
        if trouble is not None and not isinstance(trouble, _AGAIN):
            raise trouble
        if verdict.committed and reduced is not None:
            return Agreed(
                reduced, plan, verdict, seconds, attempt,
                group.sent_bytes - sent, group.received_bytes - received,
            )  # fmt: skip
        reason = verdict.reason or reason
        log.warning("round %s, epoch %s was not committed: %s", round_, plan.epoch, reason)
    raise GroupError(
        f"round {round_} was not committed", given=f"{attempts} attempts; the last: {reason}",
        remedy="look at the events of the job for members that come and go",
    )  # fmt: skip


def _reduce(
    group: Group, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str
) -> tuple[Reduced | None, AtollError | None]:
    """Return the result, or what went wrong."""
    try:
        return group.reduce(xs, codec=codec, weight=weight, key=key).wait(), None
    except AtollError as error:
        return None, error


def _commit(group: Group, plan: RoundPlan, reduced: Reduced | None, reason: str) -> Verdict:
    """Return the verdict; an attempt that the hub has forgotten counts as aborted."""
    try:
        return group.commit(reduced, ok=reduced is not None, reason=reason)
    except EpochChanged as error:
        return Verdict(round=plan.round, epoch=plan.epoch, committed=False, reason=str(error))


def agree_later(
    group: Group,
    xs: Sequence[Tensor],
    *,
    codec: Codec,
    weight: float,
    base: str,
    round_: int,
    key: str = "x",
    tokens: int = 0,
    attempts: int = 8,
) -> Work[Agreed]:
    """Begin :func:`agree` on a background thread, so that training goes on meanwhile.

    The values are copied first. One at a time per group.
    """
    copies = [x.detach().clone() for x in xs]
    return Work.start(
        lambda: agree(
            group, copies, codec=codec, weight=weight, base=base, round_=round_, key=key,
            tokens=tokens, attempts=attempts,
        ),
        name=f"agree-{group.me}",
    )  # fmt: skip
