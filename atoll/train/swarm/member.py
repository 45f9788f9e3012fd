"""The loop of one member of a SWARM: the ledger's news, the stage's work, the rounds of its stage.

One thread, the caller's, changes everything: it computes, and in between processes events. Other
threads wait for it: one for messages of members, a few for answers of the ledger, which are held
back until there are news. A round of the stage runs beside, so that this member goes on computing
for other stages that still lack a microbatch of the step.

A step: microbatches come and go; `SwarmNews` says which count; once the stage is closed its members
average the sums of what counts (`Rounds`); once all stages are, everybody steps the optimizer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, DeadlineExceeded, GroupError, HubError, PeerRefused, WireError
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.strategies.inner.swarm.activations import ActivationCodec
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.swarm.driver import Driver
from atoll.train.swarm.driving import Driving
from atoll.train.swarm.parts import (
    Agreed,
    Answer,
    Ask,
    Rounds,
    Stages,
    StepState,
    SwarmJob,
    Trained,
)
from atoll.train.swarm.work import SEND_S, Report, ReportTo, StageWork
from atoll.wire.message import Message
from atoll.wire.swarm import (
    Backward,
    Broken,
    Forward,
    Handed,
    Holder,
    Release,
    Resume,
    Share,
    SwarmAnnounce,
    SwarmDone,
    SwarmHead,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
    pack_head,
    unpack_head,
)

log = logging.getLogger(__name__)

ASK_S = 60.0
"""Time limit of a question to the ledger, which holds answers back for a shorter time."""
AGAIN_S = 1.0
"""Pause before a question that failed, or an announcement without a place, is repeated."""
MOST_EARLY = 256
"""Messages kept of the step after the present one."""


Event = PeerMail | ReportTo | Answer | Agreed


class SwarmMember:
    """See the module's docstring."""

    def __init__(
        self, me: str, job: SwarmJob, *, channel: PeerChannel, ask: Ask, rounds: Rounds,
        stages: Stages, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """Start nothing yet; see :meth:`run`."""
        self.me, self.job = me, job
        self._channel, self._ask, self._rounds, self._stages = channel, ask, rounds, stages
        self._clock: Clock = clock or RealClock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(4 + job.room, f"swarm-{me}")
        self._asked: set[type[Message]] = set()
        """Kinds of questions that wait for an answer; there is one of each at a time."""
        self._stopped = threading.Event()
        self._epoch = self._table = 0
        self._ready = False
        self._again_at = 0.0
        self.trained: Trained | None = None
        """The stage that it serves."""
        self._work: StageWork | None = None
        self._driving: Driving | None = None
        self._now = StepState()
        self._early: list[PeerMail] = []
        self.step = -1
        """Steps that this member's stage contains; -1: it has none yet."""
        self.paused = ""
        """Why the job waits, as the ledger says."""
        self.on_step: Callable[[int, float], None] = lambda step, loss: None
        """Called after each step, with the mean loss on the last stage."""

    def stop(self) -> None:
        """Let :meth:`run` return soon; from any thread."""
        self._stopped.set()

    def run(self) -> None:
        """Take part until the job's last step, or :meth:`stop`.

        Raises:
            LossNotFinite: a microbatch has no finite loss.
            AtollError: the channel has failed for good.
        """
        reader = threading.Thread(target=self._receive, name=f"mail-{self.me}", daemon=True)
        reader.start()
        try:
            while not self._stopped.is_set() and self.step < self.job.steps:
                self._tend()
                if not self._process(wait=self._work is None or not self._work.waiting):
                    continue
                if self._work is not None:
                    self._work.compute()
        finally:
            self._stopped.set()
            self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------ events

    def _receive(self) -> None:
        while not self._stopped.is_set():
            try:
                mail = self._channel.receive(timeout_s=0.5)
            except AtollError as error:
                log.info("%s: no messages of members any more: %s", self.me, error)
                return
            if mail is not None:
                self._events.put(mail)

    def _process(self, *, wait: bool) -> bool:
        """Process the events that are there; return whether to compute."""
        timeout_s = 0.0
        if wait:
            due = [self._again_at] if not self._ready else []
            if self._driving is not None:
                due.append(self._driving.due)
            timeout_s = min(0.5, max(0.0, min(due, default=1e18) - self._clock.monotonic()))
        try:
            event = self._events.get(timeout=timeout_s) if wait else self._events.get_nowait()
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return True

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerMail):
            self._mail(event)
        elif isinstance(event, ReportTo):
            self._report(event)
        elif isinstance(event, Agreed):
            if (event.step, event.closing) == (self.step, self._now.closing):
                self._now.mean = event.mean
                if event.mean is None:
                    self._now.closing = 0  # the ledger names the closing again
                else:
                    self._announce()
        else:
            self._answered(event)

    def _answered(self, event: Answer) -> None:
        self._asked.discard(type(event.asked))
        answer = event.answer
        if answer is None:
            self._again_at = self._clock.monotonic() + AGAIN_S
            if isinstance(event.asked, SwarmDone):
                self._question(event.asked)
        elif isinstance(answer, SwarmPlace):
            self._placed(answer)
        elif isinstance(answer, SwarmNews) and isinstance(event.asked, SwarmWatch):
            asked = event.asked
            here = self._epoch, self.step, self._now.shares
            if (asked.epoch, asked.step, asked.shares) == here:  # else ask again
                self._news(answer)
        elif isinstance(answer, SwarmLeases) and self._driving is not None:
            self._driving.leased([lease for lease in answer.leases if lease.step == self.step])
        elif isinstance(event.asked, SwarmDone) and self._driving is not None:
            self._driving.driver.taken(event.asked.lease)

    def _question(self, body: Message) -> None:
        """Ask the ledger in the background; the answer becomes an event."""
        self._asked.add(type(body))

        def ask() -> None:
            answer: Message | None = None
            try:
                answer = self._ask(body, timeout_s=ASK_S)
            except (DeadlineExceeded, HubError, WireError, GroupError) as error:
                log.info("%s: %s was not answered: %s", self.me, type(body).__name__, error)
            self._events.put(Answer(body, answer))

        self._pool.submit(ask)

    def _tend(self) -> None:
        """Ask what has to be asked now, and look at the driver's time limits."""
        now = self._clock.monotonic()
        if not self._ready:
            if now >= self._again_at and SwarmAnnounce not in self._asked:
                self._announce()
            return
        if SwarmWatch not in self._asked and now >= self._again_at:
            known = self._now
            self._question(
                SwarmWatch(self._epoch, self.step, known.shares, known.closing, self._table)
            )
        if self._driving is None:
            return
        if now >= self._driving.due:
            self._driving.tick()
        holding = self._driving.driver.holding
        room = self.job.room - len(holding)
        if room > 0 and SwarmWant not in self._asked and now >= self._again_at:
            self._question(SwarmWant(self._epoch, room, holding))

    # ------------------------------------------------------------------------- ledger

    def _announce(self) -> None:
        stage = self._work.stage if self._work is not None else -1
        agreed = self._now.mean is not None
        folded = self._now.folded
        self._question(SwarmAnnounce(self._epoch, stage, self.step, folded=folded, agreed=agreed))

    def _placed(self, place: SwarmPlace) -> None:
        """Take the place: keep what stands, and take over a state if it is another stage's."""
        if not place.keep and self.trained is not None:
            self._drop_all()
        self._epoch, self._now.shares = place.epoch, 0
        holder = Holder(self.me, place.epoch)
        self._again_at = self._clock.monotonic() + AGAIN_S
        if place.stage < 0:
            self._ready = False
            return
        served = self._work.stage if self._work is not None else -1
        if not place.ready and (served, self.step) != (place.stage, place.step):
            self._ready = False
            try:
                self.trained = self._stages.take(place.stage, place.step, place.donors)
            except AtollError as error:
                log.info("%s: no state of stage %s yet: %s", self.me, place.stage, error)
                return
            self.step = place.step
            self.trained.runner.begin(self.step)
            self._now, self._driving, self._again_at = StepState(), None, 0.0
            self._work = self._work_of(self.trained, holder)
            return
        if self._work is None or not place.ready:
            return
        if self._work.holder != holder or not self._ready:
            self._work.holder = holder
            self._table = 0
            if self._work.stage == 0:
                driver = Driver(
                    holder, stages=self.job.stages, rows=self.job.rows_each, random=Random()
                )
                self._driving = Driving(driver, self._work, finished=self._question)
        self._ready, self._again_at = True, 0.0

    def _work_of(self, trained: Trained, holder: Holder) -> StageWork:
        return StageWork(
            trained.runner, holder, self._channel, ActivationCodec(self.job.codec), self.job.rows,
            event=self._events.put, clock=self._clock,
        )  # fmt: skip

    def _drop_all(self) -> None:
        """Everything of this step is void: the ledger has given it to others."""
        self._now, self._driving, self._early = StepState(), None, []
        if self.trained is not None and self._work is not None:
            self._work.clear()
            self.trained.runner.begin(self.step)

    def _news(self, news: SwarmNews) -> None:
        self.paused = news.paused
        if news.dropped:
            self._ready, self._again_at = False, 0.0
            return
        if self.trained is None:
            return
        if news.peers:
            self._table = news.table
            if self._driving is not None:
                self._driving.peers(news.peers)
        for share in news.shares:
            self._count(share)
        if self._driving is not None and news.shares:
            self._driving.counted(news.shares)
        if news.closing and news.closing != self._now.closing and self._now.mean is None:
            self._close(news.closing)
        elif not news.closing:
            self._now.closing = 0
        if news.step > self.step:
            self._step_on()

    def _count(self, share: Share) -> None:
        """Fold the microbatch if it is this member's; forget other leases of it."""
        if self.trained is None:
            return
        self._now.shares += 1
        runner, key = self.trained.runner, MicrobatchKey(self.step, share.index, share.lease)
        if share.member == self.me and share not in self._now.folded:
            try:
                runner.fold(key)
            except PeerRefused as error:  # it counts on what is not here: let others compute it
                log.warning("%s: %s", self.me, error)
                self._epoch, self._ready, self._again_at = 0, False, 0.0
                return
            self._now.folded.append(share)
        for other in runner.held:
            if other.index == share.index and (share.member != self.me or other != key):
                runner.drop_pending(other)

    def _close(self, closing: int) -> None:
        """Meet the other members of the stage; this member goes on with its work."""
        if self.trained is None:
            return
        self._now.closing = closing
        vector, total = self.trained.runner.gradient()
        step = self.step

        def ended(done: Future[Tensor]) -> None:
            error = done.exception()
            if error is not None:
                log.info("%s: the round of step %s failed: %s", self.me, step, error)
            self._events.put(Agreed(step, closing, None if error else done.result()))

        stage = self.trained.runner.stage.number
        meeting = self._rounds.agree(stage, step, closing, vector=vector, rows=total.rows)
        meeting.add_done_callback(ended)

    def _step_on(self) -> None:
        """All stages have agreed: step, and begin the next step."""
        if self.trained is None or self._work is None:
            return
        if self._now.mean is None:
            self._ready, self._again_at = False, 0.0  # it missed the round: recover
            return
        runner = self.trained.runner
        loss = runner.gradient()[1].loss
        runner.apply(self._now.mean)
        self.trained.update()
        self.step += 1
        runner.begin(self.step)
        self._work.clear()
        self._now = StepState()
        if self._driving is not None:
            self._driving.driver.stepped(self.step)
        self.on_step(self.step, loss)
        early, self._early = self._early, []
        for mail in early:
            self._mail(mail)

    # ------------------------------------------------------------------------ members

    def _mail(self, mail: PeerMail) -> None:
        try:
            head = unpack_head(mail.head)
        except WireError as error:
            log.warning("%s: a message of %s is not usable: %s", self.me, mail.source, error)
            return
        if isinstance(head, Handed | Broken):
            self._reported(head)
        elif self._work is not None:
            self._take(head, mail, self._work)

    def _take(self, head: SwarmHead, mail: PeerMail, work: StageWork) -> None:
        if isinstance(head, Forward | Backward | Resume):
            if head.work.step == self.step + 1 and len(self._early) < MOST_EARLY:
                self._early.append(mail)  # the sender has heard of the end of this step earlier
            elif isinstance(head, Resume):
                work.resume(head)
            else:
                work.arrived(head, mail)
        elif isinstance(head, Release):
            work.release(head)

    def _report(self, event: ReportTo) -> None:
        if event.driver.member == self.me:
            self._reported(event.report)
        else:
            self._channel.send(event.driver.member, pack_head(event.report), timeout_s=SEND_S)

    def _reported(self, report: Report) -> None:
        if self._driving is not None:
            self._driving.reported(report)
