"""Holding one member's rounds: what it did in the period goes along, what comes back is obeyed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atoll.clock import Clock
from atoll.codec.codec import Codec
from atoll.group.agree import Agreed, agree
from atoll.group.group import Group
from atoll.task import Task
from atoll.wire.messages import Account, Lease


class Meeting:
    """Tells the group how fast this member was and where its data stands, round by round."""

    def __init__(self, group: Group, clock: Clock) -> None:
        """Measure the first period from now."""
        self.group, self._clock = group, clock
        self._ended = clock.monotonic()
        self._phases: dict[str, float] = {}

    def hold(
        self,
        task: Task,
        xs: Sequence[Tensor],
        *,
        codec: Codec,
        weight: float,
        base: str,
        key: str,
        norm: float | None = None,
    ) -> Agreed:
        """Return the mean that all members committed; see :func:`atoll.group.agree.agree`.

        The state of the task may be read by others while this waits. The task's round is not
        advanced: that is part of applying the result. `norm` is that of the contribution, where
        it says how much this member has learned.
        """
        place = task.stretch.place() if task.stretch is not None else None
        account = Account(phases=self._phases, update_norm=norm, loss=task.losses.take())
        agreed = agree(
            self.group, xs, codec=codec, weight=weight, base=base, round_=task.round, key=key,
            tokens=task.tokens, steps=task.period.done,
            busy_s=self._clock.monotonic() - self._ended,
            lease=Lease(*place) if place is not None else None, account=account,
            resting=task.gate.resting,
        )  # fmt: skip
        self._ended = self._clock.monotonic()
        told = {"wait": "join", "send": "reduce", "vote": "commit"}
        self._phases = {name: agreed.seconds[phase] for name, phase in told.items()}
        if self.group.upload_s is not None:
            self._phases["upload"] = self.group.upload_s
        verdict, me = agreed.verdict, self.group.me
        task.pace = verdict.pace.get(me, 1.0) if task.paced else 1.0
        for dealt in verdict.leases.values():
            task.leases[dealt.slot] = dict(dealt.cursor)
        lease = verdict.leases.get(me)
        if lease is not None and task.stretch is not None:
            task.stretch.move(lease.slot, lease.cursor)
        return agreed

    def applied(self, seconds: float) -> None:
        """Note how long the last round's result took to take over; part of the next account."""
        self._phases["apply"] = seconds

    def restart(self) -> None:
        """Measure the period from now on: this member took the state over from others."""
        self._ended, self._phases = self._clock.monotonic(), {}
