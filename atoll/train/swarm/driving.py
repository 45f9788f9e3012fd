"""Carry out what a driver decides: compute, send orders, report to the ledger.

On the member's own thread, as all of `work.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from atoll.swarm.driver import Begin, Driver, Effect, Finished, ReleaseAt, ResumeAt
from atoll.train.swarm.work import SEND_S, Report, ReportTo, StageWork
from atoll.wire.swarm import (
    Broken,
    Handed,
    Holder,
    Release,
    Share,
    SwarmDone,
    SwarmLease,
    SwarmPeer,
    pack_head,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Driving:
    """A driver, with the first stage's work and the ways to the others."""

    driver: Driver
    work: StageWork
    finished: Callable[[SwarmDone], None]
    """Reports to the ledger, until it is answered."""

    @property
    def due(self) -> float:
        """When :meth:`tick` is due, in monotonic seconds."""
        deadline = self.driver.next_deadline()
        return math.inf if deadline is None else deadline

    def leased(self, leases: Sequence[SwarmLease]) -> None:
        """Take new microbatches through all stages."""
        for lease in leases:
            self._carry_out(self.driver.leased(lease, self._now()))

    def reported(self, report: Report) -> None:
        """Handle the report of a member of a path, or of this one: it is done, or has failed."""
        if isinstance(report, Handed):
            self._carry_out(self.driver.handed(report, self._now()))
        else:
            log.info("stage %s of a path failed: %s", report.stage, report.reason)
            self._carry_out(self.driver.broken(report, self._now()))

    def peers(self, table: Sequence[SwarmPeer]) -> None:
        """Take over a newer table of members."""
        self._carry_out(self.driver.peers(table, self._now()))

    def counted(self, shares: Sequence[Share], *, step: int) -> None:
        """Drop microbatches that are counted under another lease."""
        self._carry_out(self.driver.counted(shares, step=step))

    def tick(self) -> None:
        """Handle expired time limits."""
        self._carry_out(self.driver.tick(self._now()))

    def _now(self) -> float:
        return self.work.clock.monotonic()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Finished):
                self.finished(effect.report)
            elif isinstance(effect, Begin):
                self.work.begin(effect.work)
            elif isinstance(effect, ResumeAt):
                self._order(effect)
            elif isinstance(effect, ReleaseAt):
                for to in effect.to:
                    self._release(to, effect.order)

    def _order(self, effect: ResumeAt) -> None:
        order = effect.order
        if effect.to.member == self.work.holder.member:
            self.work.resume(order)
            return
        work, event = order.work, self.work.event
        done = self.work.channel.send(effect.to.member, pack_head(order), timeout_s=SEND_S)

        def ended(sent: Future[None]) -> None:
            error = sent.exception()
            if error is not None:
                numbers = work.step, work.index, work.lease, work.attempt
                event(ReportTo(work.path[0], Broken(*numbers, order.stage, str(error))))

        done.add_done_callback(ended)

    def _release(self, to: Holder, order: Release) -> None:
        if to.member == self.work.holder.member:
            self.work.release(order)
        else:
            self.work.channel.send(to.member, pack_head(order), timeout_s=SEND_S)
