"""The ledger of a SWARM: counts every microbatch of every step exactly once per stage.

A microbatch (step, index) is leased to a driver, and reported `done` with the members that hold a
pending gradient. The ledger counts it for each stage for which it is not counted yet, and gives the
shares to the members of the stage: their holder *folds*, all others *drop*. When every index is
counted for a stage, the stage is *closed*: with `agrees`, its members meet in a round and then hold
the same mean. When all stages are, the step is complete and all apply it.

Rules that make the count exact:
  * a share has one holder, which is a member *at an epoch*. A member that was lost comes back under
    a new epoch, and drops what it had; what it alone held is leased again, for its stage only;
  * nothing is applied before the step is complete for all stages, so every stage can still compute
    the step again for another one;
  * late, repeated and contradicting reports find their index counted, and change nothing.

After a restart of the hub it is rebuilt from the announcements of the members (`expected`): what no
member folded is leased again. Times are monotonic seconds passed as `now`.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.swarm.counts import Kept
from atoll.swarm.leases import Leases
from atoll.swarm.places import Balance, Member, SwarmSettings, moves_to_empty, plausible
from atoll.swarm.progress import Progress
from atoll.swarm.rebalance import Move, Server, place
from atoll.swarm.rebuild import take_over
from atoll.swarm.recent import Recent
from atoll.swarm.saves import Saves
from atoll.wire.swarm import (
    Holder,
    SwarmAnnounce,
    SwarmDone,
    SwarmKept,
    SwarmLease,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)

HOLD_S = 60.0
"""A stage stays open for a member that recovers its state for this long, and twice as long again
whenever that was too short."""
MOST_HOLDS = 4


class Ledger(Progress):
    """See the module's docstring; every method may be repeated."""

    def __init__(
        self,
        settings: SwarmSettings,
        *,
        step: int = 0,
        first_number: int = 1,
        expected: Iterable[str] = (),
        rebuild_until: float = 0.0,
        saved: int | None = None,
    ) -> None:
        """Start at `step`, which the checkpoint `saved` has; -1: that is looked up when needed.

        `first_number` MUST be above all epochs, leases and closings of earlier ledgers of the job.
        Until `rebuild_until`, or until all `expected` members have announced themselves, what they
        report is taken over and nothing is leased.
        """
        start = step if saved is None else saved
        super().__init__(settings, Saves(settings.save_every, settings.steps or -1, start))
        self.history = 0
        """Changes whenever all members go back to a checkpoint."""
        self.number = self.first_number = first_number
        self._expected, self._rebuild_until = set(expected), rebuild_until
        self._leases = Leases()
        self.begin(step)
        self.begin(step)  # now there are counts of a step before, without shares
        self._balance = Balance()
        self._unlike: set[int] = set()
        """Stages that cannot be rebuilt from their neighbours."""
        self.moved: list[Move] = []
        """The newest changes of places, for people."""
        self.recent = Recent()

    # ------------------------------------------------------------------------- queries

    def rebuilding(self, now: float) -> bool:
        """Return whether announcements are still taken over, after a restart of the hub."""
        return bool(self._expected) and now < self._rebuild_until

    def bereft(self, now: float) -> int:
        """Return a stage that members wait for, whose state neither a member nor a checkpoint has.

        Then the newest checkpoint MUST be looked up, and :meth:`go_back` called. -1: none.
        """
        if self._startable or self.rebuilding(now):
            return -1
        coming = {m.stage for m in self.members.values() if not m.ready and m.stage >= 0}
        lost = [s for s in coming if not self.serving(s) and not self.neighbours_of(s)]
        return min(lost, default=-1)

    def neighbours_of(self, stage: int) -> list[list[str]]:
        """Return the members of the stages before and after a lost one, if it is rebuilt so."""
        inner = 0 < stage < self.settings.stages - 1
        if not self.settings.neighbours or not inner or stage in self._unlike or self._startable:
            return []
        both = [[m.holder.member for m in self.serving(near)] for near in (stage - 1, stage + 1)]
        return both if all(both) else []

    # ------------------------------------------------------------------------ members

    def announce(self, member: str, body: SwarmAnnounce, now: float) -> SwarmPlace:
        """A member is ready, asks for a place, or comes back."""
        known = self.members.get(member)
        if known is None and body.epoch and self.rebuilding(now):
            if body.ledger != self.first_number:  # it may have been sent long ago
                return SwarmPlace(body.epoch, -1, self.step, keep=True, ledger=self.first_number)
            known = self.members[member] if take_over(self, member, body) else None
        self._expected.discard(member)
        self.evaluations.announced(body.held_out)
        keep = known is not None and body.epoch == known.holder.epoch
        if known is None or not keep or known.stage < 0:
            known = self._enter(member, body, now)
        known.dial = body.dial or known.dial
        known.measured(body.row_s)
        known.free_bytes = body.free_bytes or known.free_bytes
        if known.stage >= 0 and not known.ready and self._fits(known, body):
            known.ready = True
            self.table += 1
        elif keep and not known.ready and known.came_late(body, self.step):
            known.hold_until = now + HOLD_S * 2 ** min(known.holds, MOST_HOLDS)
        if keep and body.agreed and body.step == self.step and body.stage == known.stage:
            known.applies = True
            if self.settings.agrees:
                self.counts[known.stage].agreed_by.add(known.holder)
        if known.ready and (body.step, body.history) == (self.step, self.history):
            self.evaluations.due |= body.evaluate
        self._close(now)
        if body.unlike and known.stage >= 0:
            self._unlike.add(known.stage)
        held = known.ready or self._startable or bool(self.serving(known.stage))
        neighbours = [] if held or self.rebuilding(now) else self.neighbours_of(known.stage)
        waits = not held and not neighbours
        others = [m.holder.member for m in self.serving(known.stage) if m is not known]
        return SwarmPlace(
            # Without any source of its state it announces itself again.
            known.holder.epoch, -1 if waits else known.stage, self.step, ready=known.ready,
            keep=keep, donors=others, neighbours=neighbours, history=self.history,
            finished=self.finished, ledger=self.first_number,
        )  # fmt: skip

    def lost(self, member: str, now: float) -> None:
        """A member is gone, or has been silent for too long: what it alone held is leased again."""
        self._expected.discard(member)
        known = self.members.pop(member, None)
        if known is not None:
            self._uncount(known.holder)
            self._fill(now)
            self._close(now)

    def go_back(self, step: int, history: int, now: float) -> None:
        """The newest checkpoint, or the start, has this state: all members go on from there.

        If that is the present state, members keep what they have.
        """
        if (step, history) != (self.step, self.history):
            self.begin(step)
            self.history = self._next()
            for member in self.members.values():
                self._send_back(member, now)
        self.saves.saved, self.saves.history = step, self.history

    def _enter(self, member: str, body: SwarmAnnounce, now: float) -> Member:
        """Give a member a new epoch, and the stage it was sent to, had, or is needed for."""
        old = self.members.pop(member, None)
        if old is not None:
            self._uncount(old.holder)
        sent = old is not None and not old.ready and old.stage >= 0
        stage = old.stage if old is not None and sent else body.stage
        server = Server(member, plausible(body.row_s), 0.0, body.free_bytes)
        if not 0 <= stage < self.settings.stages:
            stage = place(server, self.stages(ready=False))
        known = Member(Holder(member, self._next()), stage, hold_until=now + HOLD_S)
        self.members[member] = known
        return known

    @property
    def _startable(self) -> bool:
        """Whether the present state is that of the newest checkpoint, or of the start."""
        return (self.saves.saved, self.saves.history) == (self.step, self.history)

    def _fits(self, known: Member, body: SwarmAnnounce) -> bool:
        """Return whether a member's state is that of the present step, and can still take part."""
        count = self.counts[known.stage]
        if body.stage != known.stage or (count.agreed_by and known.holder not in count.agreed_by):
            return False
        return (body.step, body.history) == (self.step, self.history)

    def _uncount(self, holder: Holder) -> None:
        self.table += 1
        self.steps.lose(holder)
        self._leases.forget(holder)

    # ------------------------------------------------------------------- microbatches

    def want(self, member: str, body: SwarmWant, now: float) -> SwarmLeases:
        """Lease microbatches to a driver, and repeat those that it does not know it has."""
        known = self.members.get(member)
        if known is None or not self._current(known, body.epoch) or known.stage != 0:
            return SwarmLeases([])
        held_out = self.evaluations.lacking(self.step)
        open_by = self.steps.lacking(self.saves.last) | {(self.step, i): [] for i in held_out}
        leases = self._leases.again(known.holder, body.holding, open_by)
        if self.paused() or self.rebuilding(now) or not open_by:
            return SwarmLeases(leases)
        drivers = {m.holder: m.row_s for m in self.serving(0)}
        free = self._leases.free(known.holder, open_by, drivers, now)
        for (step, index), stages in free[: max(0, body.room - len(leases))]:
            leases.append(SwarmLease(step, index, self._next(), stages))
            self._leases.start(leases[-1], known.holder, now)
        return SwarmLeases(leases)

    def done(self, body: SwarmDone, now: float) -> None:
        """A microbatch is through: count it for every stage that has not counted it yet."""
        leased = self._leases.end(body.lease, now)
        for name, known in self.members.items():
            known.queue = body.queues.get(name, known.queue)
            known.measured(body.row_s.get(name, 0.0))
        if body.step == self.step:
            self.evaluations.due |= body.evaluate
            if leased:  # else it may be of another state
                self.evaluations.measured(body, history=self.history)
            if not 0 <= body.index < self.settings.microbatches:
                self._close(now)
        counts = self.steps.of(body.step, body.index)
        if not counts:
            return
        path: dict[int, str] = {}
        for stage, holder in zip(body.stages, body.holders, strict=False):
            found = self.members.get(holder.member)
            ready = found is not None and found.ready
            here = found is not None and (found.stage, found.holder) == (stage, holder)
            if ready and here and counts[stage].count(body.index, body.lease, holder):
                path[stage] = holder.member
        if path:
            self.recent.counted(path, now)
        self._close(now)

    def kept(self, member: str, body: SwarmKept) -> bool:
        """A member keeps a copy of another one's sum; return whether it will be used."""
        keeper, known = self.members.get(member), self.members.get(body.of.member)
        if keeper is None or known is None or body.step != self.step or known is keeper:
            return False
        there = known.holder == body.of and known.ready and known.stage == keeper.stage
        if not there or not self._current(keeper, body.epoch):
            return False
        shares = frozenset((share.index, share.lease) for share in body.shares)
        copy = Kept(keeper.holder, body.number, shares)
        return self.counts[known.stage].keep(body.of, copy)

    # -------------------------------------------------------------------------- steps

    def tick(self, now: float) -> None:
        """Process what only time brings: the end of a hold, of a rebuild."""
        self._fill(now)
        self._close(now)

    def agreed(
        self, stage: int, step: int, members: Iterable[str], now: float, *, closing: int = 0
    ) -> None:
        """The round of a closed stage was committed with these members: they hold its mean.

        A member with an epoch above `closing` (0: unknown) came back since, without the mean.
        """
        count = self.counts[stage]
        if step != self.step or count.agreed_by:
            return
        here = [self.members[m] for m in members if m in self.members]
        holders = {m.holder for m in here if m.ready and m.stage == stage}
        if closing:
            holders = {holder for holder in holders if holder.epoch < closing}
        if not holders:
            return
        count.agreed_by = holders
        self._complete(now)

    def begin(self, step: int) -> None:
        """Start counting a step from nothing; the counts of now are those of the step before."""
        self.steps.begin(step)
        self._leases.clear()
        self.evaluations.begin()

    def go_on(self) -> None:
        """Start counting the next step, with what is counted of it."""
        self.steps.go_on()
        self._leases.begin(self.step)
        self.evaluations.begin()

    def _close(self, now: float) -> None:
        if self.rebuilding(now):
            return
        for stage, count in enumerate(self.counts):
            full = len(count.counted) == self.settings.microbatches
            if full and not count.closing and not self._held(stage, now):
                count.closing = self._next()
        self._complete(now)

    def _held(self, stage: int, now: float) -> bool:
        """Return whether a member of the stage recovers its state, and may still come in time."""
        coming = [m for m in self.members.values() if m.stage == stage and not m.ready]
        return bool(self.serving(stage)) and any(now < m.hold_until for m in coming)

    def _complete(self, now: float) -> None:
        """Go to the next step if all stages can apply this one."""
        agrees = self.settings.agrees
        if not all(c.agreed_by if agrees else c.closing for c in self.counts):
            return
        if not self.evaluations.complete(self.step):
            return
        for member in self.members.values():
            if agrees and member.ready and member.holder not in self.counts[member.stage].agreed_by:
                self._send_back(member, now)  # it did not take part in the round of its stage
            member.applies = False
        self.go_on()
        if not self.last:
            self._carry_out(self._balance.moves(self.settings, self.members.values(), now), now)
        self._close(now)  # all of it may be early

    # ------------------------------------------------------------------------- places

    def _fill(self, now: float) -> None:
        """Give a stage that lost its last member another one, if any other stage can spare it.

        Members that leave a finished job one by one are no loss, and no member is to be moved.
        """
        if not self.rebuilding(now) and not self.finished:
            self._carry_out(moves_to_empty(self.settings, self.members.values()), now)

    def _carry_out(self, moves: list[Move], now: float) -> None:
        for move in moves:
            self._send_back(self.members[move.member], now, stage=move.target)
        self.moved += moves

    def _send_back(self, member: Member, now: float, *, stage: int | None = None) -> None:
        """Let a member recover the state of its stage, or another's, under a new epoch."""
        self._uncount(member.holder)
        member.holder = Holder(member.holder.member, self._next())
        member.ready, member.applies = False, False
        member.hold_until, member.row_s = now + HOLD_S, 0.0
        member.stage = member.stage if stage is None else stage

    @property
    def last(self) -> bool:
        """Whether the next round of every stage is the last one: no step comes after it."""
        return 0 <= self.saves.last <= self.step

    def stop(self) -> None:
        """End the job: after the present step if it was begun and can be completed, else now.

        Members that meet after several steps do one step more in any case: some of them may be in
        the round before it, which was planned as one that is not the last.
        """
        begun = len(self._leases) or any(count.counted for count in self.counts)
        more = begun or not self.settings.agrees
        goes_on = more and not self.paused() and not self.saves.ends(self.step)
        last = self.step + bool(goes_on)
        self.saves.stop(min(last, self.settings.steps or last))
        self.table += 1  # so that each member that watches learns it

    # --------------------------------------------------------------------------- news

    def news(self, member: str, body: SwarmWatch, now: float) -> SwarmNews | None:
        """Return what a member does not know yet; None: nothing."""
        known = self.members.get(member)
        if known is None or not self._current(known, body.epoch):
            return SwarmNews(self.step, dropped=True)
        if self.finished and body.step == self.step:
            return SwarmNews(self.step, finished=True)
        if not self.step - 1 <= body.step <= self.step:
            self._send_back(known, now)
            return SwarmNews(self.step, dropped=True)
        steps, newer = self.steps, self.table > body.table
        count = (steps.now if body.step == self.step else steps.before)[known.stage]
        shares, ahead = steps.log_from(body.step, known.stage, known=body.shares, ahead=body.ahead)
        up_to_date = not (newer or shares or ahead or count.closing != body.closing)
        if up_to_date and body.step == self.step:
            return None
        return SwarmNews(
            self.step, shares, ahead, count.closing, self.table, self.peers() if newer else [],
            paused=self.paused(), savers=self.savers(), history=self.history, last=self.saves.last,
        )  # fmt: skip

    def _current(self, known: Member, epoch: int) -> bool:
        return known.ready and known.holder.epoch == epoch

    def _next(self) -> int:
        self.number += 1
        return self.number
