"""Holding one member's rounds: what it did in the period goes along, what comes back is obeyed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atoll.clock import Clock
from atoll.codec.codec import Codec
from atoll.group.agree import Agreed, agree
from atoll.group.group import Group
from atoll.task import Task
from atoll.wire.messages import Lease


class Meeting:
    """Tells the group how fast this member was and where its data stands, round by round."""

    def __init__(self, group: Group, clock: Clock) -> None:
        """Measure the first period from now."""
        self.group, self._clock = group, clock
        self._ended = clock.monotonic()

    def hold(
        self,
        task: Task,
        xs: Sequence[Tensor],
        *,
        codec: Codec,
        weight: float,
        base: str,
        key: str,
    ) -> Agreed:
        """Return the mean that all members committed; see :func:`atoll.group.agree.agree`.

        The state of the task may be read by others while this waits. The task's round is not
        advanced: that is part of applying the result.
        """
        place = task.stretch.place() if task.stretch is not None else None
        agreed = agree(
            self.group, xs, codec=codec, weight=weight, base=base, round_=task.round, key=key,
            tokens=task.tokens, steps=task.period.done,
            busy_s=self._clock.monotonic() - self._ended,
            lease=Lease(*place) if place is not None else None, resting=task.gate.resting,
        )  # fmt: skip
        self._ended = self._clock.monotonic()
        verdict, me = agreed.verdict, self.group.me
        task.pace = verdict.pace.get(me, 1.0) if task.paced else 1.0
        for dealt in verdict.leases.values():
            task.leases[dealt.slot] = dict(dealt.cursor)
        lease = verdict.leases.get(me)
        if lease is not None and task.stretch is not None:
            task.stretch.move(lease.slot, lease.cursor)
        return agreed

    def restart(self) -> None:
        """Measure the period from now on: this member took the state over from others."""
        self._ended = self._clock.monotonic()
