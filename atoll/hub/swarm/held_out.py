"""Stores what the members of a SWARM measured on held-out data, as the points of other jobs."""

from __future__ import annotations

import math

from atoll.clock import Clock
from atoll.hub.observability.events import Events
from atoll.hub.observability.held_out import (
    HELD_OUT_ACCURACY,
    HELD_OUT_LOSS,
    HELD_OUT_LOSS_SUM,
    HELD_OUT_TOKENS,
)
from atoll.hub.observability.metrics import Metrics
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.swarm.evaluations import Evaluated
from atoll.wire.messages import Point


class HeldOutStore:
    """The evaluations of all jobs; each is stored once, even if it is reported again."""

    def __init__(
        self, *, metrics: Metrics, events: Events, checkpoints: Checkpoints, clock: Clock
    ) -> None:
        self._metrics, self._events, self._clock = metrics, events, clock
        self._checkpoints = checkpoints

    async def store(self, job: str, found: Evaluated, *, round_: int) -> None:
        """Store a complete evaluation of the state after so many rounds, and score its checkpoint.

        After a restart of the hub the present state is measured again; that changes nothing.
        """
        total = found.total
        if not found.member or not math.isfinite(total.loss_sum) or total.targets < 1:
            text = f"the held-out loss of step {found.step} is not a number"
            await self._events.add(job, "not-measured", text, member=found.member)
            return
        loss = total.loss_sum / total.targets
        values = {HELD_OUT_LOSS_SUM: total.loss_sum, HELD_OUT_TOKENS: float(total.targets)}
        if found.last:
            values = {HELD_OUT_LOSS: loss}
            if total.correct >= 0:
                values[HELD_OUT_ACCURACY] = total.correct / total.targets
        point = Point(time=self._clock.wall(), step=found.step, round=round_, values=values)
        name = f"evaluation-{found.history}-{found.step}"
        await self._metrics.add(job, found.member, incarnation=name, seq=1, points=[point])
        await self._checkpoints.score(job, found.step, loss)
