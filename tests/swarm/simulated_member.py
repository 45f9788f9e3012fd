"""A simulated member of a SWARM: its protocol with the hub and other members, without compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.swarm.copies import Copies
from atoll.swarm.driver import Begin, Driver, Effect, Finished, ReleaseAt, ResumeAt
from atoll.swarm.routing import BACKWARD, BOTH
from atoll.wire.swarm import (
    Backward,
    Broken,
    Copy,
    Forward,
    Handed,
    HeldOutSum,
    Holder,
    Release,
    Resume,
    Share,
    SwarmAnnounce,
    SwarmDone,
    SwarmHead,
    SwarmKeeps,
    SwarmKept,
    SwarmNews,
    SwarmPeer,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
    Work,
)

if TYPE_CHECKING:
    from tests.swarm.simulated import World

ROWS = 1
RETRY_S = 0.5
LATENCY_S = 0.005
ROUND_S = 0.05
RECOVER_S = 1.0
REBUILD_S = 3.0
COPY_S = 0.1
"""Seconds until a copy of a sum has arrived."""


@dataclass
class SimMember:
    """One process of a member."""

    world: World
    name: str
    row_s: float
    room: int = 6
    alive: bool = True
    me: Holder = field(default_factory=lambda: Holder("", 0))
    stage: int = -1
    step: int = -1
    life: int = 0
    """Counts what was dropped: computations of an earlier life do not end."""
    known: int = 0
    known_ahead: int = 0
    closing: int = 0
    table: int = 0
    sum: list[Share] = field(default_factory=list)
    ahead: list[Share] = field(default_factory=list)
    mean: list[Share] | None = None
    joined: bool = False
    pending: set[tuple[int, int, int]] = field(default_factory=set)
    inputs: set[tuple[int, int, int]] = field(default_factory=set)
    newest: dict[tuple[int, int, int], int] = field(default_factory=dict)
    seen: set[tuple[tuple[int, int, int], int, int, bool]] = field(default_factory=set)
    busy_until: float = 0.0
    waiting: int = 0
    history: int = 0
    ledger: int = 0
    requests: int = 0
    watches: int = 0
    wants: int = 0
    computed: int = 0
    driver: Driver | None = None
    copies: Copies = field(default_factory=Copies)
    peers: list[SwarmPeer] = field(default_factory=list)

    def start(self) -> None:
        self.world.members[self.name] = self
        self.copies.every_s = self.world.copies_s
        self.me = Holder(self.name, 0)
        self._announce()
        self._tick()

    # ---------------------------------------------------------------- standing with the hub

    def _announce(self) -> None:
        """Announce until answered; news requested before count no more."""
        self.requests += 1
        requests, world = self.requests, self.world
        body = SwarmAnnounce(
            epoch=self.me.epoch,
            stage=self.stage,
            step=self.step,
            folded=list(self.sum),
            ahead=list(self.ahead),
            agreed=self.mean is not None,
            history=self.history,
            ledger=self.ledger,
            held_out=list(world.held_out) if self.stage >= 0 else [],
            evaluate=self.step % world.evaluated_every == 0,
        )

        def answer(place: SwarmPlace) -> None:
            if self.alive and requests == self.requests:
                self.requests += 1
                self._placed(place)

        def again() -> None:
            if self.alive and requests == self.requests:
                self._announce()

        world.ask(lambda: world.announce(self.name, body), answer)
        world.after(RETRY_S, again)

    def _placed(self, place: SwarmPlace) -> None:
        world = self.world
        self.me = Holder(self.name, place.epoch)
        new, self.ledger = place.ledger != self.ledger, place.ledger
        if not place.keep:
            self._drop()
        if place.stage < 0 and new:
            self._announce()
            return
        if place.stage < 0:
            requests = self.requests
            world.after(RETRY_S, lambda: self._announce() if requests == self.requests else None)
            return
        if place.ready:
            self.known = self.known_ahead = self.table = self.closing = 0
            if place.keep:
                # The shares known so far are in the sum; the log of a rebuilt ledger repeats them.
                self.joined = False
            if self.stage == 0 and (self.driver is None or self.driver.me != self.me):
                self.driver = Driver(
                    self.me,
                    stages=world.settings.stages,
                    rows=ROWS,
                    random=Random(world.random.random()),
                )
            self._watch()
            self._want()
            return
        requests = self.requests

        def recovered() -> None:
            if not self.alive or requests != self.requests:
                return
            donors = [world.members[d] for d in place.donors if world.members[d].alive]
            donors = [d for d in donors if d.stage == place.stage and d.step >= 0]
            self.stage, self.history = place.stage, place.history
            self.step = donors[0].step if donors else max(0, place.step)
            self._announce()

        world.after(RECOVER_S if place.step > 0 else 0.01, recovered)

    def _drop(self) -> None:
        self.life += 1
        self.sum, self.ahead, self.mean, self.pending, self.inputs = [], [], None, set(), set()
        self.newest, self.seen, self.joined, self.driver = {}, set(), False, None
        self.copies.clear(self.world.now)
        self.busy_until, self.waiting = self.world.now, 0

    def _watch(self) -> None:
        requests, world, me = self.requests, self.world, self.me
        self.watches += 1
        number = self.watches

        def current() -> bool:
            return self.alive and requests == self.requests and number == self.watches

        body = SwarmWatch(
            me.epoch, self.step, self.known, self.known_ahead, self.closing, self.table
        )

        def answer(news: SwarmNews) -> None:
            if current():
                self._heard(news)

        def again() -> None:
            if current():
                self._watch()

        world.ask(lambda: world.ledger.news(self.name, body, world.now), answer, current=current)
        world.after(4 * RETRY_S, again)

    def _heard(self, news: SwarmNews) -> None:
        if news.dropped:
            self._announce()
            return
        self.known += len(news.shares)
        self.known_ahead += len(news.ahead)
        for share in news.shares:
            self._share(share, self.sum, self.step)
        for share in news.ahead:
            self._share(share, self.ahead, self.step + 1)
        self._copy()
        if news.peers:
            self.table, self.peers = news.table, news.peers
            if self.driver is not None:
                self._act(self.driver.peers(news.peers, self.world.now))
        if self.driver is not None and news.step == self.step:
            self._act(self.driver.counted(news.shares, step=self.step))
            self._act(self.driver.counted(news.ahead, step=self.step + 1))
        if news.step > self.step:
            self._apply(news)
            return
        if news.closing != self.closing:
            self.closing = news.closing
            self.rejoin()
        self._watch()

    def _share(self, share: Share, total: list[Share], step: int) -> None:
        key = (step, share.index, share.lease)
        plain = Share(share.index, share.lease, share.member)
        if share.member != self.name or plain in total:
            pass
        elif share.copy:  # never its own pending gradients of the same lease
            copy = self.copies.take(share.copy)
            if copy is None:  # the ledger counts on what is not here
                self.me = Holder(self.name, 0)
                self._announce()
                return
            total += [Share(i.index, i.lease, self.name) for i in copy.shares]
        elif key in self.pending:
            total.append(share)
        same = {p for p in self.pending if p[:2] == (step, share.index)}
        self.pending -= {p for p in same if p[2] <= share.lease}

    def _copy(self) -> None:
        """Let another member of the stage keep a copy of the sum."""
        to = self.copies.due(self.me, self.stage, self.peers, self.sum, self.world.now)
        if to is None or self.mean is not None:
            return
        copy = Copy(self.me, self.step, list(self.sum), ROWS, 0.0)
        self.copies.sent(len(self.sum))

        def arrive() -> None:
            self.copies.arrived(COPY_S, self.world.now)
            self._send(to, copy, lambda: None)

        self.world.after(COPY_S, arrive)
        self.world.after(COPY_S, lambda: self._send(to, copy, lambda: None))

    def _keep(self, copy: Copy) -> None:
        if copy.step != self.step:
            return
        number = self.copies.keep(copy)
        world, requests = self.world, self.requests
        body = SwarmKept(self.me.epoch, copy.of, copy.step, number, copy.shares)

        def answered(answer: SwarmKeeps) -> None:
            self.copies.kept(number, used=answer.used)

        def again() -> None:
            if self.alive and requests == self.requests and self.copies.asks(number):
                world.ask(lambda: SwarmKeeps(world.ledger.kept(self.name, body)), answered)
                world.after(RETRY_S, again)

        again()

    def rejoin(self) -> None:
        if self.alive and self.closing and self.mean is None:
            self.world.join(self, self.closing)

    def _apply(self, news: SwarmNews) -> None:
        world, agrees = self.world, self.world.settings.agrees
        held = self.mean if agrees else list(self.sum)
        if held is None or news.step != self.step + 1:
            self._announce()
            return
        world.applied.setdefault((self.stage, self.step), {})[self.name] = held
        self.step = news.step
        self.sum, self.known = self.ahead, self.known_ahead
        self.ahead, self.mean, self.known_ahead, self.closing = [], None, 0, 0
        self.pending = {key for key in self.pending if key[0] >= self.step}
        self.inputs = {key for key in self.inputs if key[0] >= self.step}
        self.newest = {key: n for key, n in self.newest.items() if key[0] >= self.step}
        self.seen = {call for call in self.seen if call[0][0] >= self.step}
        self.copies.clear(world.now)
        if self.driver is not None:
            self.driver.stepped(self.step)
        self._watch()

    # ------------------------------------------------------------------------------- driving

    def _want(self) -> None:
        driver, world, me, requests = self.driver, self.world, self.me, self.requests
        if driver is None:
            return
        self.wants += 1
        number = self.wants

        def current() -> bool:
            return self.alive and requests == self.requests and number == self.wants

        room = self.room - len(driver.holding)
        body = SwarmWant(me.epoch, room, driver.holding)

        def request() -> Any:
            answer = world.ledger.want(self.name, body, world.now)
            return answer.leases or None

        def answer(leases: Any) -> None:
            if self.alive and requests == self.requests and self.driver is driver:
                for lease in leases:
                    if lease.step >= self.step:
                        self._act(driver.leased(lease, world.now))

        if room > 0:
            world.ask(request, answer, current=current)

    def _tick(self) -> None:
        """Every quarter of a second: deadlines, and asking for more work."""
        if not self.alive:
            return
        if self.driver is not None:
            self._act(self.driver.tick(self.world.now))
            if len(self.driver.holding) < self.room:
                self._want()
        self.world.after(0.25, self._tick)

    def _act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Begin(work):
                    self._take(Forward(work, 0, "", []))
                case ResumeAt(to, order):
                    self._send(to, order, lambda: None)
                case ReleaseAt(to, order):
                    for holder in to:
                        self._send(holder, order, lambda: None)
                case Finished(report):
                    self._report(report)

    def _report(self, report: SwarmDone) -> None:
        driver, world = self.driver, self.world
        if driver is None or not self.alive or report.lease not in driver.holding:
            return
        due = report.step == self.step and self.step % world.evaluated_every == 0
        report = msgspec.structs.replace(report, evaluate=due)

        def request() -> bool:
            world.ledger.done(report, world.now)
            world.done_rows += 1
            return True

        def answer(_: bool) -> None:
            driver.answered(report.lease)
            if self.driver is driver and len(driver.holding) <= self.room // 2:
                self._want()

        world.ask(request, answer)
        world.after(RETRY_S, lambda: self._report(report))

    # ------------------------------------------------------------------------------ computing

    def _send(self, to: Holder, head: SwarmHead, failed: Callable[[], None]) -> None:
        """Send to a member; `failed` is called later if its process is gone."""
        if to.member == self.name:  # within a process nothing is lost
            self.world.after(0.0, lambda: self._take(head))
            return
        peer = self.world.members.get(to.member)
        if peer is None or not peer.alive:
            self.world.after(LATENCY_S, failed)
            return
        self.world.carry(lambda: peer._take(head))

    def _take(self, head: SwarmHead) -> None:
        if not self.alive:
            return
        match head:
            case Handed():
                if self.driver is not None:
                    self._act(self.driver.handed(head, self.world.now))
            case Broken():
                if self.driver is not None:
                    self._act(self.driver.broken(head, self.world.now))
            case Copy():
                self._keep(head)
            case Release():
                key = (head.step, head.index, head.lease)
                self.inputs.discard(key)
                self.seen = {call for call in self.seen if call[0] != key}
                if head.drop:
                    self.pending.discard(key)
            case Forward() | Backward() | Resume():
                self._work(head)

    def takes(self, work: Work) -> bool:
        """Return whether it has the weights on which a microbatch is computed."""
        early = work.step == self.step + 1 and work.index < self.world.settings.early
        return work.step == self.step or early

    def _work(self, head: Forward | Backward | Resume) -> None:
        work, stage = head.work, head.stage
        backward = isinstance(head, Backward)
        if work.path[stage] != self.me or work.step < self.step:
            self._broken(work, stage, busy=True)
            return
        if work.step > self.step and not self.takes(work):  # others have applied the step already
            self.world.after(0.05, lambda: self._take(head))
            return
        if work.attempt < self.newest.get(work.key, 0):
            return
        if not isinstance(head, Forward) and work.key not in self.inputs:
            self._broken(work, stage, busy=True)
            return
        call = (work.key, work.attempt, stage, backward)
        if call in self.seen:
            return
        self.seen.add(call)
        self.newest[work.key] = work.attempt
        last = stage == self.world.settings.stages - 1
        units = BOTH if last else BACKWARD if backward else 1.0
        if work.evaluates:
            units = 1.0
        else:
            self.inputs.add(work.key)
        seconds = units * ROWS * self.row_s
        self.busy_until = max(self.busy_until, self.world.now) + seconds
        self.waiting += 1
        life = self.life

        def ready() -> None:
            if self.alive and life == self.life:
                self.waiting -= 1
                self.computed += 1
                back = (backward or last) and not work.evaluates
                self._computed(work, stage, backward=back, seconds=seconds)

        self.world.after(self.busy_until - self.world.now, ready)

    def _computed(self, work: Work, stage: int, *, backward: bool, seconds: float) -> None:
        if not self.takes(work) or work.attempt < self.newest.get(work.key, 0):
            return
        if backward and stage in work.stages:
            self.pending.add(work.key)
        to = stage - 1 if backward else stage + 1
        found: HeldOutSum | None = None
        if work.evaluates and stage == self.world.settings.stages - 1:
            number = work.index - self.world.settings.microbatches
            if number >= self.world.held_out[0]:
                number -= self.world.held_out[0]
            found = HeldOutSum(2.0**number * (self.step + 1), 1)
        report = Handed(
            work.step, work.index, work.lease, work.attempt, stage, backward, seconds, self.waiting,
            found,
        )  # fmt: skip
        self._send(work.path[0], report, lambda: None)
        if found is not None or (backward and stage == min(work.stages)):
            return
        head: SwarmHead = Backward(work, to, "", []) if backward else Forward(work, to, "", [])
        self._send(work.path[to], head, lambda: self._broken(work, to, busy=False))

    def _broken(self, work: Work, stage: int, *, busy: bool) -> None:
        report = Broken(work.step, work.index, work.lease, work.attempt, stage, busy=busy)
        if self.alive:
            self._send(work.path[0], report, lambda: None)
