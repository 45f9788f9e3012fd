"""The ledger of a SWARM: counts every microbatch of every step exactly once per stage.

A microbatch (step, index) is leased to a driver, and reported `done` with the members that hold a
pending gradient, one per stage. The ledger counts it for each stage for which it is not counted
yet, and gives the shares to the members of the stage: their holder *folds*, all others *drop*.
When every index is counted for a stage, the stage is *closed*: with `agrees`, its members meet in
a round and then hold the same mean. When all stages are, the step is complete and all apply it.

Rules that make the count exact:
  * a share has one holder, which is a member *at an epoch*. A member that was lost comes back under
    a new epoch, and drops what it had; what it alone held is leased again, for its stage only;
  * nothing is applied before the step is complete for all stages, so every stage can still compute
    the step again for another one;
  * late, repeated and contradicting reports find their index counted, and change nothing.

The ledger keeps the present step and the shares of the one before. After a restart of the hub it
is rebuilt from the announcements of the members (`expected`): what no member folded is leased
again. It has no sockets, files or clock: times are monotonic seconds passed as `now`.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.swarm.counts import StageCount
from atoll.swarm.leases import Leases
from atoll.swarm.places import Member, SwarmSettings
from atoll.swarm.rebalance import Move, Server, Stages, fill_empty, place, plan_moves
from atoll.wire.swarm import (
    Holder,
    SwarmAnnounce,
    SwarmDone,
    SwarmLease,
    SwarmLeases,
    SwarmNews,
    SwarmPeer,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)

HOLD_S = 60.0
"""A stage stays open for a member that recovers its state for this long."""


class Ledger:
    """See the module's docstring; every method may be repeated."""

    def __init__(
        self,
        settings: SwarmSettings,
        *,
        step: int = 0,
        first_number: int = 1,
        expected: Iterable[str] = (),
        rebuild_until: float = 0.0,
    ) -> None:
        """Start at `step`.

        `first_number` MUST be above all epochs, leases and closings of earlier ledgers of the job.
        Until `rebuild_until`, or until all `expected` members have announced themselves, what they
        report is taken over and nothing is leased.
        """
        self.settings, self.step = settings, step
        self._number = first_number
        self._expected, self._rebuild_until = set(expected), rebuild_until
        self.members: dict[str, Member] = {}
        self.counts = self._no_counts()
        self._before = self._no_counts()
        self._leases = Leases()
        self._balanced_at: float | None = None
        self.table = 1
        """Version of the table of members."""
        self.moved: list[Move] = []
        """The newest changes of places, for people."""

    # ------------------------------------------------------------------------- queries

    def rebuilding(self, now: float) -> bool:
        """Return whether announcements are still taken over, after a restart of the hub."""
        return bool(self._expected) and now < self._rebuild_until

    def stage_of(self, member: str) -> int:
        """Return the stage that a member serves; -1: none at present."""
        known = self.members.get(member)
        return known.stage if known is not None and known.ready else -1

    def serving(self, stage: int) -> list[Member]:
        """Return the ready members of a stage."""
        return [m for m in self.members.values() if m.ready and m.stage == stage]

    def required(self, stage: int) -> set[str]:
        """Return the members without which the round of a closed stage would lose a share."""
        return self.counts[stage].holders()

    def paused(self) -> str:
        """Return why nothing is leased, or an empty text."""
        empty = [s for s in range(self.settings.stages) if not self.serving(s)]
        if not empty:
            return ""
        text = f"no member serves stage {', '.join(map(str, empty))}"
        needs = [self.settings.needs_bytes[s] for s in empty if self.settings.needs_bytes]
        return text + (f": needs {max(needs) / 1e9:.1f} GB of memory" if needs else "")

    def peers(self) -> list[SwarmPeer]:
        """Return the table of all ready members."""
        return [
            SwarmPeer(m.holder.member, m.holder.epoch, m.stage, m.dial, m.row_s)
            for m in self.members.values()
            if m.ready
        ]

    # ------------------------------------------------------------------------ members

    def announce(self, member: str, body: SwarmAnnounce, now: float) -> SwarmPlace:
        """A member is ready, asks for a place, or comes back."""
        known = self.members.get(member)
        if known is None and self.rebuilding(now) and self._take_over(member, body):
            known = self.members[member]
        self._expected.discard(member)
        keep = known is not None and body.epoch == known.holder.epoch
        if known is None or not keep or known.stage < 0:
            known = self._enter(member, body, now)
        known.dial = body.dial or known.dial
        known.row_s = body.row_s or known.row_s
        known.free_bytes = body.free_bytes or known.free_bytes
        if known.stage >= 0 and not known.ready and self._fits(known, body):
            known.ready = True
            self.table += 1
        if keep and body.agreed and body.step == self.step and body.stage == known.stage:
            known.applies = True
            if self.settings.agrees:
                self.counts[known.stage].agreed_by.add(known.holder)
        self._close(now)
        return SwarmPlace(
            known.holder.epoch,
            known.stage,
            self.step,
            ready=known.ready,
            keep=keep,
            donors=[m.holder.member for m in self.serving(known.stage) if m is not known],
        )

    def lost(self, member: str, now: float) -> None:
        """A member is gone, or has been silent for too long: what it alone held is leased again."""
        self._expected.discard(member)
        known = self.members.pop(member, None)
        if known is not None:
            self._uncount(known.holder)
            self._fill(now)
            self._close(now)

    def _enter(self, member: str, body: SwarmAnnounce, now: float) -> Member:
        """Give a member a new epoch, and the stage it was sent to, had, or is needed for."""
        old = self.members.pop(member, None)
        if old is not None:
            self._uncount(old.holder)
        sent = old is not None and not old.ready and old.stage >= 0
        stage = old.stage if old is not None and sent else body.stage
        server = Server(member, body.row_s, 0.0, body.free_bytes)
        if not 0 <= stage < self.settings.stages:
            stage = place(server, self._stages(ready=False))
        known = Member(Holder(member, self._next()), stage, hold_until=now + HOLD_S)
        self.members[member] = known
        return known

    def _take_over(self, member: str, body: SwarmAnnounce) -> bool:
        """Believe a member of an earlier ledger; False if another one has its shares."""
        if body.epoch <= 0 or not 0 <= body.stage < self.settings.stages:
            return False
        behind = body.step < self.step
        if behind and not (body.agreed and body.step == self.step - 1):
            return False
        if body.step > self.step:
            self._leap(body.step)
        holder, count = Holder(member, body.epoch), self.counts[body.stage]
        mine = [] if behind else body.folded
        if not (body.agreed and not behind):
            if count.agreed_by and mine:
                return False
            if any(share.index in count.counted for share in mine):
                return False
        self._number = max(self._number, body.epoch, *(share.lease for share in mine), 0) + 1
        for share in mine:
            count.count(share.index, share.lease, holder)
        self.members[member] = Member(holder, body.stage, ready=True)
        self.table += 1
        return True

    def _leap(self, step: int) -> None:
        """A member is at a later step, so this one was complete; only who agreed can follow."""
        there = self.members.items() if step == self.step + 1 else ()
        self.members = {name: member for name, member in there if member.applies}
        self._before, self.counts = self.counts, self._no_counts()
        self.step = step

    def _fits(self, known: Member, body: SwarmAnnounce) -> bool:
        """Return whether a member's state is that of the present step, and can still take part."""
        count = self.counts[known.stage]
        if body.stage != known.stage or (count.agreed_by and known.holder not in count.agreed_by):
            return False
        return body.step == self.step or (body.restored and not self.serving(known.stage))

    def _uncount(self, holder: Holder) -> None:
        self.table += 1
        for count in self.counts:
            count.lose(holder)
        self._leases.forget(holder)

    # ------------------------------------------------------------------- microbatches

    def want(self, member: str, body: SwarmWant, now: float) -> SwarmLeases:
        """Lease microbatches to a driver, and repeat those that it does not know it has."""
        known = self.members.get(member)
        if known is None or not self._current(known, body.epoch) or known.stage != 0:
            return SwarmLeases([])
        lacking = self._lacking()
        leases = self._leases.again(known.holder, body.holding, lacking)
        if self.paused() or self.rebuilding(now):
            return SwarmLeases(leases)
        for index, stages in self._leases.free(known.holder, lacking, now):
            if len(leases) >= body.room:
                break
            leases.append(SwarmLease(self.step, index, self._next(), stages))
            self._leases.start(leases[-1], known.holder, now)
        return SwarmLeases(leases)

    def done(self, body: SwarmDone, now: float) -> None:
        """A microbatch is through: count it for every stage that has not counted it yet."""
        self._leases.end(body.lease, now)
        for name, queue in body.queues.items():
            if name in self.members:
                self.members[name].queue = queue
        for name, row_s in body.row_s.items():
            if name in self.members and row_s > 0:
                self.members[name].row_s = row_s
        if body.step != self.step or not 0 <= body.index < self.settings.microbatches:
            return
        for stage, holder in zip(body.stages, body.holders, strict=False):
            known = self.members.get(holder.member)
            there = known is not None and known.stage == stage and known.holder == holder
            if known is not None and there and known.ready:
                self.counts[stage].count(body.index, body.lease, holder)
        self._close(now)

    def _lacking(self) -> dict[int, list[int]]:
        """Return the stages that have not counted each index, without those that have all."""
        lacking = {
            index: [
                stage
                for stage, count in enumerate(self.counts)
                if not count.agreed_by and index not in count.counted
            ]
            for index in range(self.settings.microbatches)
        }
        return {index: stages for index, stages in lacking.items() if stages}

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
        for member in self.members.values():
            if agrees and member.ready and member.holder not in self.counts[member.stage].agreed_by:
                self._send_back(member, now)  # it did not take part in the round of its stage
            member.applies = False
        self._before, self.counts = self.counts, self._no_counts()
        self._leases.clear()
        self.step += 1
        period_s = self.settings.rebalance_s
        if self._balanced_at is None:
            self._balanced_at = now
        elif period_s and now >= self._balanced_at + period_s and self._all_ready():
            self._balanced_at = now
            self._carry_out(plan_moves(self._stages()), now)

    # ------------------------------------------------------------------------- places

    def _fill(self, now: float) -> None:
        """Give a stage that lost its last member another one, if any other stage can spare it."""
        there = {m.stage for m in self.members.values()}
        empty = [stage for stage in range(self.settings.stages) if stage not in there]
        if not empty or self.rebuilding(now):
            return
        # A member that only recovers its state costs nothing to move.
        coming = [m for m in self.members.values() if not m.ready and self.serving(m.stage)]
        for member, stage in zip(coming, list(empty), strict=False):
            if self._stages().fits(member.server(), stage):
                self._send_back(member, now, stage=stage)
                empty.remove(stage)
        self._carry_out(fill_empty(self._stages(), empty), now)

    def _carry_out(self, moves: list[Move], now: float) -> None:
        for move in moves:
            self._send_back(self.members[move.member], now, stage=move.target)
        if moves:
            self.moved = moves

    def _send_back(self, member: Member, now: float, *, stage: int | None = None) -> None:
        """Let a member recover the state of its stage, or of another one, under a new epoch."""
        self._uncount(member.holder)
        member.holder = Holder(member.holder.member, self._next())
        member.ready, member.hold_until, member.row_s = False, now + HOLD_S, 0.0
        member.stage = member.stage if stage is None else stage

    def _all_ready(self) -> bool:
        return all(member.ready for member in self.members.values())

    def _stages(self, *, ready: bool = True) -> Stages:
        there = [m for m in self.members.values() if m.ready or not ready]
        servers = [
            [m.server() for m in there if m.stage == stage] for stage in range(self.settings.stages)
        ]
        return Stages(servers, self.settings.costs, self.settings.needs_bytes)

    # --------------------------------------------------------------------------- news

    def news(self, member: str, body: SwarmWatch, now: float) -> SwarmNews | None:
        """Return what a member does not know yet; None: nothing."""
        known = self.members.get(member)
        if known is None or not self._current(known, body.epoch):
            return SwarmNews(self.step, dropped=True)
        if not self.step - 1 <= body.step <= self.step:
            self._send_back(known, now)
            return SwarmNews(self.step, dropped=True)
        count = (self.counts if body.step == self.step else self._before)[known.stage]
        newer = self.table > body.table
        shares = count.log[body.shares :]
        if not (newer or shares or count.closing != body.closing or body.step < self.step):
            return None
        return SwarmNews(
            self.step,
            shares=shares,
            closing=count.closing,
            table=self.table,
            peers=self.peers() if newer else [],
            paused=self.paused(),
        )

    def _current(self, known: Member, epoch: int) -> bool:
        return known.ready and known.holder.epoch == epoch

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _no_counts(self) -> list[StageCount]:
        return [StageCount() for _ in range(self.settings.stages)]
