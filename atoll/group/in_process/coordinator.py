"""The round machine behind a lock: for members on threads what `atoll/hub/rounds` is for machines.

Each call passes one event to the :class:`RoundMachine` and carries out the effects that it returns.
The machine is passive: waiting threads wake up at its deadlines and let it settle.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from atoll.clock import RealClock
from atoll.errors import (
    AtollError,
    DeadlineExceeded,
    EpochChanged,
    GroupError,
    GroupLeft,
    PeerLost,
)
from atoll.group.in_process.exchanges import AttemptExchanges, Exchange
from atoll.group.in_process.servers import MemoryServers
from atoll.group.period import PeriodReport
from atoll.ids import slot_of
from atoll.reducer.all_to_all import AllToAllMessages, Outgoing
from atoll.reducer.combine import NormHistory
from atoll.reducer.mean import Mean, Share
from atoll.rounds.commit import CommitLog
from atoll.rounds.data_slots import Cursor, DataSlots
from atoll.rounds.effects import Decided, Effect, MemberDropped, Planned, Refused
from atoll.rounds.machine import RoundMachine
from atoll.rounds.member_states import AWAITED
from atoll.rounds.timing import FixedWaits
from atoll.wire.messages import Registered, RoundPlan, RoundVote, Source, Sources, Verdict
from atoll.wire.states import RoundMemberState

KEPT_ATTEMPTS = 8
"""Votes on older attempts are refused: such a late member has to join again anyway."""


class Coordinator:
    """Decides the rounds of the members of one process. Thread-safe."""

    def __init__(
        self, names: Sequence[str], *, waits: FixedWaits, start_round: int, min_members: int
    ) -> None:
        """Expect the members `names`; see :class:`MemoryGroups`."""
        self.order = sorted(names, key=slot_of)
        """All members so far, in slot order."""
        self.timeout_s = waits.timeout_s
        self.checkpoint_round = -1
        """Round to return to if no member holds the committed state; -1: the beginning."""
        self.paces: dict[str, float] = {}
        """Paces in verdicts; fixed, because measured times would make runs differ."""
        self.delay = 1
        """Steps that hide a round, in verdicts; fixed for the same reason."""
        # All members communicate through this object, so every plan uses the relay's route.
        # `starting` is off, because all members exist and none is still being launched.
        self.machine = RoundMachine(
            "memory", nodes_wanted=len(names), min_nodes=min_members, preference="relay",
            committed_round=start_round, start_round=start_round, starting=False,
            reducer_ready=True, waits=waits,
            commit_log=CommitLog(data_slots=DataSlots(self._num_slots()), paced=False),
        )  # fmt: skip
        for name in self.order:
            self.machine.expect(name)
            self.machine.register(name, dial=[])
        self.changed = threading.Condition()
        """Held during each call; notified after each change."""
        self._clock = RealClock()
        self._planned: dict[str, AttemptExchanges] = {}
        """Plans that their members have not fetched yet."""
        self._refused: dict[str, AtollError] = {}
        """Errors of joins without a plan."""
        self._ended: dict[str, AtollError] = {}
        """Errors raised by calls of members that were killed or left."""
        self._doomed: dict[str, str] = {}
        """Members to be killed, and the phase at which."""
        self._state_addresses: dict[str, list[str]] = {}
        self._attempts: dict[int, AttemptExchanges] = {}
        self._norms = NormHistory()
        self._cursors_at: dict[int, dict[int, Cursor]] = {}
        """Position in every data slot after each committed round."""
        self.servers = MemoryServers(
            changed=self.changed, order=self.order, ended=self._ended, timeout_s=self.timeout_s,
            is_awaited=lambda m: self.machine.members.states.get(m) in AWAITED,
        )  # fmt: skip

    # ------------------------------------------------------------------------ membership

    def register(self, member: str, state: Sequence[str]) -> Registered:
        """Record a member's address for recovery, and return the state of the group."""
        with self.changed:
            self._state_addresses[member] = list(state)
            machine = self.machine
            return Registered(
                slot=slot_of(member), num_slots=self._num_slots(),
                committed_round=machine.committed_round, stopping=machine.stopping,
                recover=machine.recovers and not machine.members.knows(member),
            )  # fmt: skip

    def recover(self, member: str, failed: Sequence[str], *, ready: bool) -> Sources:
        """See :meth:`Group.recover`."""
        with self.changed:
            self._enter(member, "recover")
            if ready:
                self._carry_out(self.machine.recover(member, self._now()))
                # The state to recover is the one after the open attempt.
                self._wait_until(lambda: self.machine.attempt is None)
            holders = self.machine.members.holders(member, failed)
            if not holders:
                self._rewind()
            data_slots = self.machine.commit_log.data_slots
            return Sources(
                round=self.machine.committed_round,
                peers=[Source(m, self._state_addresses.get(m, [])) for m in holders],
                checkpoint_round=-1 if holders else self.checkpoint_round,
                pace=self.paces.get(member, 1.0),
                lease=data_slots.lease(member) if data_slots.cursors else None,
            )

    def _rewind(self) -> None:
        """Return to the checkpoint because no member holds the committed state."""
        round_ = max(0, self.checkpoint_round)
        if round_ != self.machine.committed_round:
            self.machine.rewind(round_, self._cursors_at.get(round_, {}))

    def stand(self, member: str, round_: int, base: str) -> None:
        """See :meth:`Group.standing`; raises LeftBehind if it is not the state of the group."""
        with self.changed:
            self._enter(member, "standing")
            self._carry_out(self.machine.stand(member, round_, base, self._now()))

    def leave(self, member: str, reason: str, *, patience_s: float) -> None:
        """See :meth:`Group.leave`; an open attempt with this member may take `patience_s`."""
        with self.changed:
            self.changed.wait_for(lambda: not self.machine.attends(member), patience_s)
            error = GroupLeft("this member has left the group", given=reason or member)
            self._end(member, error, self.machine.leave)

    def add(self, member: str | None) -> str:
        """Add a new process of a member that ended, or a new member; return its name.

        Raises:
            KeyError: a living member has this name.
        """
        with self.changed:
            name = member if member is not None else f"w{slot_of(self.order[-1]) + 1}"
            if name in self.order and name not in self._ended:
                raise KeyError(name)
            if name not in self.order:
                self.order.append(name)
                self.order.sort(key=slot_of)
                self.machine.commit_log.data_slots.slots = self._num_slots()
            self._ended.pop(name, None)
            self.machine.expect(name)
            return name

    def stop(self) -> None:
        """Mark the next plan as the job's last."""
        with self.changed:
            self.machine.stopping = True

    def silent(self, member: str) -> None:
        """Stop waiting for a member, as if it were frozen; its own calls fail later."""
        with self.changed:
            self._carry_out(self.machine.silent(member, self._now()))

    def kill(self, member: str, *, at: str) -> None:
        """Kill a member `now`, or when it enters a phase."""
        with self.changed:
            self._doomed[member] = at
            if at == "now":
                self._kill(member)

    def _enter(self, member: str, phase: str) -> None:
        """Raise the error of an ended member; kill it if it is to end in this phase."""
        if self._doomed.get(member) == phase:
            self._kill(member)
        if member in self._ended:
            raise self._ended[member]

    def _kill(self, member: str) -> None:
        self._end(member, PeerLost("this member was killed", given=member), self.machine.gone)

    def _end(
        self,
        member: str,
        error: AtollError,
        occurrence: Callable[[str, float], list[Effect]],
    ) -> None:
        self._ended.setdefault(member, error)
        self._doomed.pop(member, None)
        self._carry_out(occurrence(member, self._now()))

    # ----------------------------------------------------------------- join, reduce, commit

    def join(
        self, member: str, report: PeriodReport, *, timeout_s: float | None
    ) -> AttemptExchanges:
        """See :meth:`Group.join`.

        Without `timeout_s` the default applies, which does not run while members are lacking.
        """
        with self.changed:
            self._enter(member, "join")
            self._refused.pop(member, None)
            self._planned.pop(member, None)
            self._carry_out(self.machine.join(member, report.as_join(), self._now()))
            attempt = self.machine.attempt
            if attempt is not None and attempt.attends(member):
                self._planned.pop(member, None)
                return self._attempts[attempt.plan.epoch]
            return self._await_plan(member, timeout_s)

    def _await_plan(self, member: str, timeout_s: float | None) -> AttemptExchanges:
        began = self._now()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        while True:
            self._carry_out(self.machine.settle(self._now()))
            if member in self._planned:  # even if the attempt is already decided
                return self._planned.pop(member)
            if member in self._ended:
                raise self._ended[member]
            if member in self._refused:
                raise self._refused.pop(member)
            endless = timeout_s is None and bool(self.machine.paused)
            began = max(began, self.machine.pending.not_before)  # a pause does not count
            left_s = math.inf if endless else began + limit_s - self._now()
            if left_s <= 0:
                # No plan may include a member that has stopped waiting for it.
                self._carry_out(self.machine.silent(member, self._now()))
                raise DeadlineExceeded("joining the round took too long", given=f"{limit_s:.1f} s")
            self._sleep(left_s)

    def contribute(self, attempt: AttemptExchanges, number: int, share: Share) -> Mean:
        """Contribute to a reduce; return the mean when all remaining members have contributed."""
        exchange = self._enter_exchange(attempt, number, share.member, share)
        if exchange.mean is None:
            raise EpochChanged("this attempt was aborted", given=attempt.plan.epoch)
        return exchange.mean

    def hand_in(
        self, attempt: AttemptExchanges, number: int, messages: Outgoing
    ) -> AllToAllMessages:
        """Contribute to an all-to-all; return all packets when all remaining members have."""
        exchange = self._enter_exchange(attempt, number, messages.member, messages)
        if exchange.bundle is None:
            raise EpochChanged("this attempt was aborted", given=attempt.plan.epoch)
        return exchange.bundle

    def _enter_exchange(
        self, attempt: AttemptExchanges, number: int, member: str, item: Share | Outgoing
    ) -> Exchange:
        with self.changed:
            self._enter(member, "send")
            exchange = attempt.exchanges.setdefault(number, Exchange())
            if isinstance(item, Share):
                exchange.shares.setdefault(member, item)
            else:
                exchange.messages.setdefault(member, item)
            attempt.compute_complete(self._norms)
            self.changed.notify_all()
            self._enter(member, "sent")
            self._await(member, "the exchange", lambda: exchange.over or bool(attempt.verdict))
            if exchange.error is not None:
                raise exchange.error
            if member in exchange.refused:
                raise exchange.refused[member]
            return exchange

    def vote(self, attempt: AttemptExchanges, member: str, body: RoundVote) -> Verdict:
        """See :meth:`Group.commit`."""
        with self.changed:
            self._enter(member, "commit")
            if attempt.verdict is None:
                self._take_vote(member, body)
                attempt.compute_complete(self._norms)
            try:
                self._await(member, "the vote", lambda: attempt.verdict is not None)
            except DeadlineExceeded:
                for silent in attempt.attempt.missing():
                    self._carry_out(self.machine.silent(silent, self._now()))
            if attempt.verdict is None:
                raise EpochChanged("this attempt has no verdict", given=attempt.plan.epoch)
            return attempt.verdict

    def _take_vote(self, member: str, body: RoundVote) -> None:
        try:
            self._carry_out(self.machine.vote(member, body, self._now()))
        except EpochChanged:
            raise
        except GroupError:  # the vote contradicts the plan: continue without this member
            self._carry_out(self.machine.withdraw(member, self._now()))
            raise

    # ------------------------------------------------------------------------- effects

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out the effects of an event, and wake all waiting threads."""
        for effect in effects:
            if isinstance(effect, Planned):
                self._plan(effect.plan)
            elif isinstance(effect, Decided):
                self._decide(effect)
            elif isinstance(effect, Refused):
                self._refused[effect.member] = effect.error
            elif isinstance(effect, MemberDropped):
                self._attempts[effect.plan.epoch].compute_complete(self._norms)
        self.changed.notify_all()

    def _plan(self, plan: RoundPlan) -> None:
        attempt = self.machine.attempt
        assert attempt is not None
        opened = self._attempts[plan.epoch] = AttemptExchanges(attempt)
        self._attempts.pop(plan.epoch - KEPT_ATTEMPTS, None)
        self._planned |= dict.fromkeys(plan.members, opened)

    def _decide(self, decided: Decided) -> None:
        verdict = decided.verdict
        if verdict.committed:
            self._cursors_at[verdict.round + 1] = {s: dict(c) for s, c in decided.cursors.items()}
            states = self.machine.members.states
            gone = RoundMemberState.GONE
            paces = {m: pace for m, pace in self.paces.items() if states.get(m) != gone}
            verdict = msgspec.structs.replace(verdict, pace=paces, delay=self.delay)
        self._attempts[verdict.epoch].verdict = verdict

    # --------------------------------------------------------------------------- waiting

    def _now(self) -> float:
        return self._clock.monotonic()

    def _sleep(self, limit_s: float) -> None:
        """Wait for a change, for the machine's next deadline, or for `limit_s`."""
        machine, now = self.machine, self._now()
        ends = machine.awaited_until().values() if machine.joins else ()
        next_s = min((end - now for end in ends if end > now), default=math.inf)
        seconds = min(limit_s, next_s)
        self.changed.wait(seconds if math.isfinite(seconds) else None)

    def _wait_until(self, ready: Callable[[], bool]) -> bool:
        return self.changed.wait_for(ready, self.timeout_s)

    def _await(self, member: str, what: str, ready: Callable[[], bool]) -> None:
        """Wait for `ready`; raises the error that ended the member, or DeadlineExceeded."""
        in_time = self._wait_until(lambda: ready() or member in self._ended)
        if member in self._ended and not ready():
            raise self._ended[member]
        if not in_time:
            raise DeadlineExceeded(f"{what} took too long", given=f"{self.timeout_s:.1f} s")

    def _num_slots(self) -> int:
        return slot_of(self.order[-1]) + 1
