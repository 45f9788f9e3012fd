"""From waiting members to the plan of the next attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.rounds import timing as patience
from atoll.rounds.attempt import Attempt
from atoll.rounds.bases import Bases
from atoll.rounds.checks import AheadOfHub, ahead_of, differs, majority_base, shortage, wrong_lease
from atoll.rounds.effects import Effect, EventRaised, Paused, Planned, Refused, StateAdopted
from atoll.rounds.member_states import present
from atoll.rounds.routing import Route, choose_route
from atoll.rounds.state import JobRounds
from atoll.wire.messages import RoundPlan
from atoll.wire.states import RoundMemberState

EPOCH_LEAP = 1_000_000
"""Epochs skipped when a round is adopted: those already assigned by the lost record are unknown."""

EMPTY_S = 2.0
"""A job without members for this long is paused; long enough for a job that ends to be over."""


@dataclass
class Quorum(JobRounds):
    """Decides when enough members wait, which of them take part, and the route."""

    _awaited: list[str] = field(default_factory=list)
    """Members that the last scan found to be waited for."""
    _present: int = 0
    """How many they were, plus those that had joined."""

    def gather(self, now: float) -> list[Effect]:
        """Return the next plan if it is due, and the effects before it."""
        if self.attempt is not None:
            return []
        if not self.joins:
            return self._see_if_empty(now)
        if self._waits_still(now):
            return []
        effects = self._settle_ahead(now)
        if not self.joins or any(j.round > self.committed_round for j in self.joins.values()):
            return effects
        short = shortage(len(present(self.members, self.joins)), self.min_nodes)
        if short:
            return effects + self._pause(short)
        effects += self._unpause(now)
        if self.joins.keys() <= self.guests:  # they cannot meet: no member is late for them
            self.pending.not_before = now
            return effects
        late = self._late(now)
        if late is None or self._too_few_to_start(now):
            return effects
        for member in late:
            effects += self._give_up_waiting(member)
        effects += self._refuse_different()
        short = shortage(len(self.joins), self.min_nodes)
        if short:
            return effects + self._pause(short)
        if self.required - set(self.joins):
            return effects
        self._learn_from_abort()
        relay_only = self.commit_log.relay_only(self.committed_round) or self._hub_is_faster
        route = choose_route(self.preference, self.joins, self.dials, relay_only=relay_only)
        if route.needs_reducer and not self.reducer_ready:
            return effects
        return [*effects, self._make_plan(route, now)]

    # --------------------------------------------------------------------------- waiting

    def _late(self, now: float) -> list[str] | None:
        """Return the members that the next plan waits for no longer; None: it waits still."""
        until = self.awaited_until()
        self._awaited = [member for member, deadline in until.items() if now < deadline]
        self._present = len(self.joins) + len(self._awaited)
        if self._awaited and not self._is_quorum(now, missing=len(self._awaited)):
            return None
        # A member that recovers in time is not late: the others only go on without it.
        states = self.members.states
        return [
            member
            for member, deadline in until.items()
            if now >= deadline or states[member] != RoundMemberState.RECOVERING
        ]

    def _is_quorum(self, now: float, *, missing: int) -> bool:
        """Return whether those that wait go on without `missing` others."""
        waiting = len(self.joins)
        if not self.quorum or self.starting or waiting < self.quorum * (waiting + missing):
            return False
        if self.pending.enough_at is None:
            self.pending.enough_at = now
        timings = self.commit_log.timings
        grace_s = patience.quorum_grace_s(timings, waiting=waiting, missing=missing)
        since = max(self.pending.enough_at, self.pending.not_before)
        return grace_s is not None and now >= since + grace_s

    def _waits_still(self, now: float) -> bool:
        """Return whether the plan still waits for a known member: then nothing else is to be done.

        With thousands of members a join must not scan all of them. `_awaited` are those that the
        last scan found to be waited for.
        """
        least = max(1, self.min_nodes)
        usual = not (self.paused or self.guests or self.pending.highest > self.committed_round)
        if not usual or len(self.joins) < least:
            return False
        if self._is_quorum(now, missing=self._present - len(self.joins)):
            return False
        while self._awaited:
            deadline = self.deadline_of(self._awaited[-1])
            if deadline is not None and now < deadline:
                return True
            self._awaited.pop()
        return False

    def _see_if_empty(self, now: float) -> list[Effect]:
        """Pause if no member is left and the job is not just ending."""
        if not self.members.all_gone():
            self.empty_at = None
            return []
        self.empty_at = now if self.empty_at is None else self.empty_at
        if now < self.empty_at + EMPTY_S:
            return []
        return self._pause(shortage(0, max(1, self.min_nodes)))

    def _pause(self, short: str) -> list[Effect]:
        if self.paused == short:
            return []
        self.paused, self.commit_log.committed_at = short, None
        return [Paused(short), EventRaised("paused", f"paused: {short}")]

    def _unpause(self, now: float) -> list[Effect]:
        if not self.paused:
            return []
        self.paused, self.pending.not_before = "", now
        return [
            Paused(""),
            EventRaised("unpaused", "enough members have joined: the run continues"),
        ]

    def _too_few_to_start(self, now: float) -> bool:
        least = self.min_nodes or self.nodes_wanted
        waiting = now < self.pending.since() + self.first_grace_s
        return self.starting and len(self.joins) < least and waiting

    def _give_up_waiting(self, member: str) -> list[Effect]:
        if self.members.states[member] != RoundMemberState.RECOVERING:
            self.pending.late.add(member)
            return self.leave_out(member, "it did not join in time")
        self.members.too_slow(member, self.committed_round)
        text = f"{member} recovers the state too slowly: round {self.committed_round} continues"
        return [EventRaised("too-slow-to-recover", text, member)]

    # -------------------------------------------------------------------- diverging states

    def _settle_ahead(self, now: float) -> list[Effect]:
        """Decide whether the record is behind the members, or a member is ahead of the group."""
        ahead = ahead_of(self.joins, self.committed_round)
        if ahead is None:
            return []
        claims = [m for m, j in self.joins.items() if j.round > self.committed_round]
        if len(claims) < len(self.joins) or self.members.up_to_date.keys() - set(claims):
            self.unproved = False
            return [effect for member in claims for effect in self.refuse(member)]
        missing = set(self.members.awaited()) - set(claims)
        if missing and (now < self.pending.since() + self.grace_s() or len(claims) < 2):
            return []
        return self._adopt(ahead)

    def _adopt(self, ahead: AheadOfHub) -> list[Effect]:
        """Adopt the committed round of the members."""
        text = (
            f"the record ends at round {self.committed_round}, but {', '.join(ahead.members)}"
            f" are at round {ahead.round}, which is recovered from them"
        )
        self.committed_round, self.unproved, self.starting = ahead.round, False, False
        self.epoch += EPOCH_LEAP * self.groups
        self.members.committed(ahead.members)
        self.members.bases = Bases.of(dict.fromkeys(ahead.members, ahead.base))
        self.commit_log.data_slots.hold_only({})
        odd = [m for m, join in self.joins.items() if join.round != ahead.round]
        refused = [effect for member in odd for effect in self.refuse(member)]
        for member in ahead.members:
            refused += self._claim_slot(member)
        return [StateAdopted(ahead.round), EventRaised("adopted", text, alarm=True), *refused]

    def _claim_slot(self, member: str) -> list[Effect]:
        """Adopt a member's data slot, unless another member has it."""
        lease, leases = self.joins[member].lease, self.commit_log.data_slots
        wrong = leases.wrong(member, lease) if lease is not None else ""
        if wrong:
            return [
                Refused(member, wrong_lease(wrong)),
                *self.step_aside(member, RoundMemberState.AWAY),
            ]
        if lease is not None:
            leases.hold(member, lease.slot)
        return []

    def _refuse_different(self) -> list[Effect]:
        """Refuse members with another state than the majority; they must recover first."""
        bases = {m: join.base for m, join in self.joins.items()}
        own = {m: base for m, base in bases.items() if m not in self.guests}
        base = majority_base(own or bases)
        effects: list[Effect] = []
        for member in [m for m, join in self.joins.items() if join.base != base]:
            error = differs(self.joins[member].base, base, self.committed_round)
            text = f"{member} differs from the other replicas at round {self.committed_round}"
            effects += [
                Refused(member, error),
                EventRaised("replica-differs", text, member, alarm=True),
            ]
            effects += self.step_aside(member, RoundMemberState.AWAY)
            self.members.forget(member)
        return effects

    # ------------------------------------------------------------------------- the plan

    @property
    def _hub_is_faster(self) -> bool:
        """Whether the next round goes through the hub although it could go directly."""
        through_hub = self.commit_log.timings.faster_route.through_hub
        return through_hub and self.reducer_ready and self.collective in ("", "auto")

    def _learn_from_abort(self) -> None:
        """Attribute an abort to the route if all its members have joined again.

        Only then, because the loss of a member may become known after the verdict.
        """
        attempt, self.aborted = self.aborted, None
        if attempt is not None and set(attempt.plan.members) <= self.joins.keys():
            self.commit_log.abort(attempt)

    def _make_plan(self, route: Route, now: float) -> Planned:
        spread_s = self.pending.spread_s(starting=self.starting)
        patience.learn_spread(self.commit_log.timings, spread_s)
        self.epoch += self.groups
        self.starting = False
        members = self.pending.members()
        plan = RoundPlan(
            job=self.job,
            round=self.committed_round,
            epoch=self.epoch,
            members=members,
            route=route.name,
            reducer=route.reducer(self.job),
            store=route.store,
            timeout_s=self.timeout_s(route.name),
            stopping=self.stopping,
            saving=self.saving,
            verified=self.verified,
            unweighted=[name for name in members if name in self.unweighted],
            sites=route.sites,
            stores=route.stores,
            group=self.group,
            ring=self.lines.ring(members) if route.name == "direct" else [],
            collective=self.collective if route.name == "direct" else "",
        )
        self.attempt = Attempt(plan, now, self.pending.leave_for(plan.round))
        return Planned(plan, self.attempt.joins)
