"""The stage that a member serves: its work, what of the present step counts, and its rounds.

For the member's own thread. A round of the stage runs beside, so that this member goes on computing
for other stages that still lack a microbatch of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random

import msgspec
from torch import Tensor

from atoll.clock import Clock
from atoll.errors import WireError
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.strategies.inner.swarm.activations import ActivationCodec
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StepSum
from atoll.swarm.copies import Copies
from atoll.swarm.driver import Driver
from atoll.train.swarm.driving import Driving
from atoll.train.swarm.keeping import Keeping
from atoll.train.swarm.parts import (
    Agreed,
    Counted,
    Event,
    Rounds,
    StepState,
    SwarmJob,
    Trained,
)
from atoll.train.swarm.work import SEND_S, Effort, Report, ReportTo, StageWork
from atoll.wire.message import Message
from atoll.wire.swarm import (
    Backward,
    Broken,
    Copy,
    Forward,
    Handed,
    Holder,
    Release,
    Resume,
    Share,
    SwarmDone,
    SwarmHead,
    SwarmPeer,
    pack_head,
    unpack_head,
)

log = logging.getLogger(__name__)

MOST_EARLY = 256
"""Messages kept of steps that have not begun here."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a member's stages share with it."""

    channel: PeerChannel
    rounds: Rounds
    event: Callable[[Event], None]
    """Takes events from any thread."""
    ask: Callable[[Message], None]
    """Asks the ledger; its answers become events."""
    effort: Effort
    clock: Clock


class ServedStage:
    """See the module's docstring."""

    def __init__(
        self, trained: Trained, step: int, *, holder: Holder, job: SwarmJob, around: Around
    ) -> None:
        """Serve a stage from `step` on."""
        self.trained, self.step, self.now = trained, step, StepState()
        self.work = StageWork(
            trained.runner, holder, around.channel, ActivationCodec(job.codec), job.rows,
            event=around.event, clock=around.clock, effort=around.effort,
            evaluating=trained.evaluating,
        )  # fmt: skip
        self.driving: Driving | None = None
        self._job, self._channel, self._rounds = job, around.channel, around.rounds
        self._event, self._ask = around.event, around.ask
        self._early: list[PeerMail] = []
        self.keeping = Keeping(
            around.channel, around.ask, around.clock, Copies(every_s=job.copies_s)
        )
        self.keeping.clear()
        self._table: list[SwarmPeer] = []

    @property
    def number(self) -> int:
        """The stage, from 0."""
        return self.work.stage

    @property
    def me(self) -> Holder:
        """This member, at its present epoch."""
        return self.work.holder

    def enter(self, holder: Holder) -> None:
        """Enter the table of members at this epoch: microbatches may arrive from now on."""
        self.work.holder = holder
        if self.number == 0:
            driver = Driver(
                holder, stages=self._job.stages, rows=self._job.rows_each, random=Random()
            )
            self.driving = Driving(driver, self.work, finished=self._finished)

    def _finished(self, report: SwarmDone) -> None:
        """Tell the ledger that a microbatch is done, and whether to evaluate this state."""
        due = report.step == self.step and self.trained.evaluates
        self._ask(msgspec.structs.replace(report, evaluate=due))

    def void(self) -> None:
        """Drop everything of this step: the ledger has given it to others."""
        self.now, self.driving, self._early = StepState(), None, []
        self.work.clear()
        self.keeping.clear()
        self.trained.runner.begin(self.step)

    # ---------------------------------------------------------------------- what counts

    def peers(self, table: list[SwarmPeer]) -> None:
        """Take over a newer table of members."""
        self._table = table
        self._channel.reach({peer.member: peer.dial for peer in table})
        if self.driving is not None:
            self.driving.peers(table)

    def count(self, shares: list[Share], ahead: list[Share]) -> None:
        """Fold what is this member's, and forget other leases of the same microbatches.

        `ahead` are those of the step after the present one.

        Raises:
            PeerRefused: the ledger counts on what is not here; nothing else may be counted.
        """
        for share in shares:
            self._count(share, self.now.counted, self.step)
        for share in ahead:
            self._count(share, self.now.ahead, self.step + 1)
        if self.now.mean is None:
            folded = self.now.counted.folded
            self.keeping.send(self.me, self._table, folded, self.trained.runner)
        for step, some in ((self.step, shares), (self.step + 1, ahead)):
            if self.driving is not None and some:
                self.driving.counted(some, step=step)

    def _count(self, share: Share, counted: Counted, step: int) -> None:
        counted.shares += 1
        runner, key = self.trained.runner, MicrobatchKey(step, share.index, share.lease)
        mine = share.member == self.me.member
        folded, plain = counted.folded, Share(share.index, share.lease, share.member)
        if mine and plain not in folded:
            if share.copy:  # never its own pending gradients of the same lease
                shares = self.keeping.take_over(share.copy, runner)
                folded += [Share(s.index, s.lease, share.member) for s in shares]
            else:
                runner.fold(key)
                folded.append(plain)
        for other in runner.held:
            if (other.step, other.index) == (step, share.index) and other.lease <= share.lease:
                runner.drop_pending(other)

    # --------------------------------------------------------------------------- rounds

    @property
    def applies(self) -> bool:
        """Whether it can apply the step: it has the mean, or steps by itself and knows all."""
        return self.now.mean is not None if self._job.agrees else self.now.closing > 0

    def close(self, closing: int) -> None:
        """Start the round of the stage's members; this one goes on with its work meanwhile."""
        self.now.closing = closing
        if not self._job.agrees:
            return
        self.now.meetings.add(closing)
        vector, total = self.trained.runner.gradient()
        step = self.step

        def ended(done: Future[Tensor]) -> None:
            error = done.exception()
            if error is not None:
                log.info("%s: the round of step %s failed: %s", self.me.member, step, error)
            self._event(Agreed(step, closing, None if error else done.result()))

        meeting = self._rounds.agree(
            self.number, step, closing, vector=vector, rows=total.rows,
            shapes=self.trained.runner.shapes,
        )  # fmt: skip
        meeting.add_done_callback(ended)

    def agreed(self, event: Agreed) -> bool:
        """Handle the end of a closing's round; return whether its mean is new here.

        It counts even if the stage was opened again meanwhile: what was committed holds the shares
        of all members of the round.
        """
        if event.step != self.step or event.closing not in self.now.meetings:
            return False
        self.now.meetings.discard(event.closing)
        if event.mean is None:
            if event.closing == self.now.closing:
                self.now.closing = 0  # the ledger names the closing again
            return False
        new = self.now.mean is None
        self.now.mean = event.mean
        return new

    def step_on(self, *, last: bool = False) -> StepSum | None:
        """All stages have agreed: step, and begin the next step; return what this one folded.

        After the `last` step its members meet in any case. None: this member has missed the round,
        and must recover the state.

        Raises:
            LossNotFinite: the gradient is not finite; nothing was updated.
            GroupError: as `Trained.meet`.
        """
        mean, own = self.now.mean, not self._job.agrees
        if mean is None and not own:
            return None
        began = self.work.clock.monotonic()
        vector, total = self.trained.runner.gradient()
        if own and total.rows:
            mean = vector
        self.trained.update(mean, rows=total.rows)
        self.work.effort.busy_s += self.work.clock.monotonic() - began
        self.trained.meet(last=last)
        self.step += 1
        self.work.begin_step(self.step)
        self.keeping.clear()
        self.now = StepState(self.now.ahead)
        if self.driving is not None:
            self.driving.driver.stepped(self.step)
        early, self._early = self._early, []
        for mail in early:
            self.mail(mail)
        return total

    # ------------------------------------------------------------------- other members

    def mail(self, mail: PeerMail) -> None:
        """Handle a message of another member."""
        try:
            head = unpack_head(mail.head)
        except WireError as error:
            name = self.me.member
            log.warning("%s: a message of %s is not usable: %s", name, mail.source, error)
            return
        if isinstance(head, Handed | Broken):
            self._reported(head)
        else:
            self._take(head, mail)

    def _take(self, head: SwarmHead, mail: PeerMail) -> None:
        if isinstance(head, Forward | Backward | Resume):
            work, takes = head.work, self.trained.runner.takes
            if not takes(work.step, work.index) and self.step < work.step <= self.step + 2:
                if len(self._early) < MOST_EARLY:
                    self._early.append(mail)  # the sender has learned of the end of a step earlier
            elif isinstance(head, Resume):
                self.work.resume(head)
            else:
                self.work.arrived(head, mail)
        elif isinstance(head, Copy):
            self.keeping.arrived(head, mail, epoch=self.me.epoch, runner=self.trained.runner)
        elif isinstance(head, Release):
            self.work.release(head)

    def report(self, event: ReportTo) -> None:
        """Tell the driver of a microbatch what has ended here."""
        if event.driver.member == self.me.member:
            self._reported(event.report)
        else:
            self._channel.send(event.driver.member, pack_head(event.report), timeout_s=SEND_S)

    def _reported(self, report: Report) -> None:
        if self.driving is not None:
            self.driving.reported(report)
