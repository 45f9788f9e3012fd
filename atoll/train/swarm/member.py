"""The loop of one member of a SWARM: the ledger's news, the stage's work, the rounds of its stage.

One thread, the caller's, changes everything: it computes, and in between processes events. Other
threads wait for it: one for messages of members, a few for answers of the ledger (`asking.py`).

A step: microbatches come and go; `SwarmNews` says which count; once the stage is closed its members
average the sums of what counts (`Rounds`); once all stages are, every member steps the optimizer.
What belongs to the stage is in `serving.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from atoll.checkpoint.neighbours import NeighboursDiffer
from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, ConfigError, DataError, GroupLeft, LeftBehind, PeerRefused
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.strategies.inner.swarm.runner import StepSum
from atoll.train.swarm.asking import Asking
from atoll.train.swarm.parts import Agreed, Answer, Ask, Event, Rounds, Stages, SwarmJob, Trained
from atoll.train.swarm.serving import Around, ServedStage
from atoll.train.swarm.work import Effort, ReportTo
from atoll.wire.swarm import (
    Holder,
    SwarmAnnounce,
    SwarmDone,
    SwarmKeeps,
    SwarmKept,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmUnsaved,
    SwarmWant,
    SwarmWatch,
)

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Pause before a question that failed, or an announcement without a place, is repeated."""
POLL_S = 0.5
"""How often the member checks for the end of the run while no event comes."""


class SwarmMember:
    """See the module's docstring."""

    def __init__(
        self, me: str, job: SwarmJob, *, channel: PeerChannel, ask: Ask, rounds: Rounds,
        stages: Stages, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """Start nothing yet; see :meth:`run`."""
        self.me, self.job = me, job
        self._channel, self._stages = channel, stages
        self._clock: Clock = clock or RealClock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._asking = Asking(me, ask, event=self._events.put, most=4 + job.room)
        self.effort = Effort()
        self._around = Around(
            channel, rounds, event=self._events.put, ask=self._asking.ask, effort=self.effort,
            clock=self._clock,
        )  # fmt: skip
        self._stopped = threading.Event()
        self._epoch = self._table = self._history = self._ledger = 0
        self._ready = self._unlike = False
        self._again_at = 0.0
        self._served: ServedStage | None = None
        self.last = job.steps
        """Steps after which the job ends; fewer than planned if it is asked to stop."""
        self.finished = False
        """The job is over, as the ledger says: the last step is done and saved."""
        self._save_step = -1
        """Step whose state this member has to save."""
        self._saved = -1, -1
        """History and step of the last state that it saved."""
        self.paused = ""
        """Why the job waits, as the ledger says."""
        self.on_step: Callable[[StepSum], None] = lambda total: None
        """Called after each step, with what this member has folded in it."""

    @property
    def trained(self) -> Trained | None:
        """The stage that it serves."""
        return self._served.trained if self._served is not None else None

    @property
    def step(self) -> int:
        """Steps that this member's stage contains; -1: it has none yet."""
        return self._served.step if self._served is not None else -1

    @property
    def waiting(self) -> int:
        """Microbatches that wait to be computed here."""
        return self._served.work.waiting if self._served is not None else 0

    def stop(self) -> None:
        """Let :meth:`run` return soon; from any thread."""
        self._stopped.set()

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Take part until the job's last step, :meth:`stop`, or until `should_stop` is true.

        Raises:
            LossNotFinite: a microbatch has no finite loss.
            ConfigError: the model cannot be cut like that.
            DataError: data is missing, or too little is held out.
            AtollError: the channel has failed for good.
        """
        reader = threading.Thread(target=self._receive, name=f"mail-{self.me}", daemon=True)
        reader.start()
        try:
            while not self._stopped.is_set() and not should_stop() and not self.finished:
                self._tend()
                self._process(wait=self._served is None or not self._served.work.waiting)
                if self._served is not None:
                    self._served.work.compute()
            if self._served is not None and self.step >= self.last:
                # Only a job that ends while it waits for a stage has steps left since a round.
                self._served.trained.meet(last=True)
        except (GroupLeft, LeftBehind) as error:
            log.info("%s: %s", self.me, error)
        finally:
            self._stopped.set()
            self._asking.close()

    # ------------------------------------------------------------------------ events

    def _receive(self) -> None:
        while not self._stopped.is_set():
            try:
                mail = self._channel.receive(timeout_s=POLL_S)
            except AtollError as error:
                log.info("%s: no messages of members any more: %s", self.me, error)
                return
            if mail is not None:
                self._events.put(mail)

    def _process(self, *, wait: bool) -> None:
        """Process the events that are there; `wait` for the first."""
        timeout_s = 0.0
        if wait:
            due = [self._again_at] if not self._ready else []
            if self._served is not None and self._served.driving is not None:
                due.append(self._served.driving.due)
            timeout_s = min(POLL_S, max(0.0, min(due, default=1e18) - self._clock.monotonic()))
        try:
            event = self._events.get(timeout=timeout_s) if wait else self._events.get_nowait()
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _handle(self, event: Event) -> None:
        if isinstance(event, Answer):
            self._answered(event)
        elif self._served is None:
            return
        elif isinstance(event, PeerMail):
            self._served.mail(event)
        elif isinstance(event, ReportTo):
            self._served.report(event)
        elif isinstance(event, Agreed):
            self._agreed(event, self._served)

    def _answered(self, event: Answer) -> None:
        self._asking.answered(event)
        answer, question, served = event.answer, event.question, self._served
        if answer is None:
            self._again_at = self._clock.monotonic() + AGAIN_S
            if isinstance(question, SwarmDone | SwarmUnsaved):
                self._asking.ask(question)
            elif isinstance(question, SwarmKept) and served is not None:
                served.keeping.answered(question, used=None)
        elif isinstance(answer, SwarmPlace):
            self._placed(answer)
        elif served is None:
            return
        elif isinstance(answer, SwarmNews) and isinstance(question, SwarmWatch):
            now = served.now
            here = self._epoch, served.step, now.counted.shares, now.ahead.shares
            there = question.epoch, question.step, question.shares, question.ahead
            if there == here:  # else ask again
                self._news(answer, served)
        elif isinstance(answer, SwarmKeeps) and isinstance(question, SwarmKept):
            served.keeping.answered(question, used=answer.used)
        elif served.driving is None:
            return
        elif isinstance(answer, SwarmLeases):
            takes = served.trained.runner.takes
            served.driving.leased([one for one in answer.leases if takes(one.step, one.index)])
        elif isinstance(question, SwarmDone):
            served.driving.driver.answered(question.lease)

    def _tend(self) -> None:
        """Ask what has to be asked now, and look at the driver's time limits."""
        now, asking, served = self._clock.monotonic(), self._asking, self._served
        if not self._ready or served is None:
            if now >= self._again_at and not asking.waits(SwarmAnnounce):
                self._announce()
            return
        known = served.now
        if not known.over and not asking.waits(SwarmWatch) and now >= self._again_at:
            driving, sent = served.driving, self._channel.sent
            failures = driving.driver.failures() if driving is not None else []
            asking.ask(
                SwarmWatch(
                    self._epoch, served.step, known.counted.shares, known.ahead.shares,
                    known.closing, self._table, failures=failures, direct_bytes=sent.direct,
                    relayed_bytes=sent.relayed,
                )
            )  # fmt: skip
        if served.driving is None:
            return
        if now >= served.driving.due:
            served.driving.tick()
        holding = served.driving.driver.holding
        room = self.job.room - len(holding)
        if room > 0 and not asking.waits(SwarmWant) and now >= self._again_at:
            asking.ask(SwarmWant(self._epoch, room, holding))

    # ------------------------------------------------------------------------- ledger

    def _announce(self) -> None:
        dial, unlike, free = self._channel.dial, self._unlike, self.job.free_bytes
        body = SwarmAnnounce(self._epoch, dial=dial, unlike=unlike, free_bytes=free)
        if self._served is not None:
            served = self._served
            now = served.now
            body = SwarmAnnounce(
                self._epoch, served.number, served.step, folded=now.counted.folded,
                ahead=now.ahead.folded, agreed=served.applies, dial=dial,
                history=self._history, unlike=unlike, free_bytes=free,
                held_out=list(self._stages.held_out), evaluate=served.trained.evaluates,
                last=self.last if self.last < self.job.steps else -1, ledger=self._ledger,
            )  # fmt: skip
        self._asking.ask(body)

    def _placed(self, place: SwarmPlace) -> None:
        """Take the place: keep what is valid, and take over its state unless this member has it."""
        served = self._served
        if served is not None:
            if not place.keep:
                served.void()
            served.now.counted.shares = served.now.ahead.shares = 0
        self._epoch, self.finished = place.epoch, place.finished and not place.ready
        new, self._ledger = place.ledger != self._ledger, place.ledger
        self._again_at = 0.0 if new else self._clock.monotonic() + AGAIN_S
        if place.stage < 0 or self.finished:
            self._ready = False
            return
        holder = Holder(self.me, place.epoch)
        wanted = place.stage, place.step, place.history
        own = (served.number, served.step, self._history) if served is not None else None
        if not place.ready and own != wanted:
            self._ready = False
            self._take_state(place, holder)
        elif place.ready and served is not None:
            if served.me != holder or not self._ready:
                served.enter(holder)
                self._table = 0
            self._ready, self._again_at = True, 0.0

    def _take_state(self, place: SwarmPlace, holder: Holder) -> None:
        self._unlike = False
        try:
            trained = self._stages.take(place)
        except NeighboursDiffer as error:
            log.warning("%s: %s", self.me, error)
            self._unlike = True
            return
        except (ConfigError, DataError):
            raise  # it would fail on any other member, too
        except AtollError as error:
            log.info("%s: no state of stage %s yet: %s", self.me, place.stage, error)
            return
        self._served = ServedStage(
            trained, place.step, holder=holder, job=self.job, around=self._around
        )
        self._history, self._again_at = place.history, 0.0

    def _news(self, news: SwarmNews, served: ServedStage) -> None:
        self.paused = news.paused
        if news.last >= 0:
            self.last = min(self.last, news.last)
        if news.finished and news.step == served.step:
            self.finished = True
            return
        if news.dropped:
            self._ready, self._again_at = False, 0.0
            return
        if news.peers:
            self._table = news.table
            self._channel.reach({peer.member: peer.dial for peer in news.peers})
            served.peers(news.peers)
        try:
            served.count(news.shares, news.ahead)
        except PeerRefused as error:  # it counts work that is not here: others compute it
            log.warning("%s: %s", self.me, error)
            self._epoch, self._ready, self._again_at = 0, False, 0.0
            return
        if not news.closing:
            served.now.closing = 0
        elif news.closing != served.now.closing and served.now.mean is None:
            served.close(news.closing)
        self._save_step = news.step if self.me in news.savers else -1
        if news.step > served.step:
            # The verdict of this stage's round may arrive after the news that follow from it.
            served.now.over = served.now.mean is None and bool(served.now.meetings)
            if not served.now.over:
                self._step_on(served)
        elif served.step == self.last:  # it may have been asked to stop after this step had begun
            try:
                served.trained.meet(last=True)
            except LeftBehind as error:
                self._left_behind(error)
                return
        self._save(served)

    def _save(self, served: ServedStage) -> None:
        """Save the state of now, once, if this member is to."""
        now = self._history, served.step
        if served.step == self._save_step and self._saved != now:
            self._saved = now
            unsaved = SwarmUnsaved(served.step)
            self._stages.save(
                history=self._history, final=served.step == self.last,
                failed=lambda: self._events.put(Answer(unsaved, None)),
            )  # fmt: skip

    def _agreed(self, event: Agreed, served: ServedStage) -> None:
        new, now = served.agreed(event), served.now
        if now.over:
            if now.mean is not None or not now.meetings:
                self._step_on(served)
        elif new:
            self._announce()

    def _step_on(self, served: ServedStage) -> None:
        try:
            total = served.step_on(last=served.step + 1 >= self.last)
        except LeftBehind as error:
            self._left_behind(error)
            return
        if total is None:
            self._ready, self._again_at = False, 0.0  # it missed the round: recover
        else:
            self._save(served)
            self.on_step(total)

    def _left_behind(self, error: LeftBehind) -> None:
        log.warning("%s: %s", self.me, error)
        self._served, self._epoch, self._ready, self._again_at = None, 0, False, 0.0
