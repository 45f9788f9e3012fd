"""The rules of a round, without sockets, files or a clock: who meets, and what was decided.

A round is join -> reduce -> commit. :class:`JobRounds` is told what happened (a member joined,
voted, was lost; time went by) and returns what follows. It never acts: whoever calls it makes each
consequence durable before anyone hears of it (see `rounds.py`).

The transaction is that of two-phase commit (Gray, "Notes on data base operating systems", 1978)
with a coordinator that never waits for a dead participant: a member that is lost before it voted is
left out, and finds on its return that the group went on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.errors import EpochChanged, GroupError
from atoll.hub import measures as patience
from atoll.hub.effects import (
    Adopted,
    Decided,
    Effect,
    Held,
    Lost,
    Noted,
    Planned,
    Refused,
)
from atoll.hub.forming import (
    AWAITED,
    LEAVING,
    Standing,
    ahead_of,
    differs,
    left_behind,
    present,
    shortage,
)
from atoll.hub.leases import Cursor, Leases
from atoll.hub.measures import Measures
from atoll.hub.pace import learn_steps, paces, too_slow
from atoll.hub.sites import Route, choose_route
from atoll.hub.verdicts import DIFFERENT, judge, majority_base, odd_ones
from atoll.ids import session_id, slot_of
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict

EPOCH_LEAP = 1_000_000
"""Epochs skipped when a round is adopted: those that the lost record gave out are not known."""

MAX_RELAY_ROUNDS = 64
"""Longest time that a route which failed is left alone."""


@dataclass
class JobRounds:
    """Where the rounds of one job stand. Times are monotonic seconds handed in as `now`."""

    job: str
    nodes_wanted: int
    min_nodes: int = 0
    """With fewer members the run pauses; 0: one is enough."""
    preference: str = "auto"
    """`auto`, `direct` or `relay`."""
    paced: bool = True
    """Slower members do fewer steps."""
    committed_round: int = 0
    """Rounds committed so far: the next one to join."""
    start_round: int = 0
    """What `committed_round` was when the job was started or resumed."""
    epoch: int = 0
    """The last epoch given out, in any life of the hub."""
    first_grace_s: float = 120.0
    """How long the first round waits for members that are still starting."""
    starting: bool = True
    """No round was planned since the job started: wait for every member that is wanted."""
    unproved: bool = False
    """The record comes from an earlier life of the hub, and no member has confirmed it yet."""
    stopping: bool = False
    reducer_ready: bool = False
    paused: str = ""
    """Why no round is planned, if so."""
    measures: Measures = field(default_factory=Measures)
    leases: Leases = field(default_factory=lambda: Leases(0))
    standing: dict[str, Standing] = field(default_factory=dict)
    dials: dict[str, list[str]] = field(default_factory=dict)
    stands: set[str] = field(default_factory=set)
    """Members known to stand on the committed state."""
    recorded: set[str] = field(default_factory=set)
    """Members that stand on it by the record of an earlier life, not confirmed yet."""
    bases: dict[str, str] = field(default_factory=dict)
    """Digests of the committed state that members have told."""
    plan: RoundPlan | None = None
    """The attempt that awaits its verdict."""
    left: set[str] = field(default_factory=set)
    """Members of the plan that are not waited for any more."""
    votes: dict[str, RoundVote] = field(default_factory=dict)
    joins: dict[str, RoundJoin] = field(default_factory=dict)
    """Members that wait for the next plan."""
    committed_at: float | None = None
    """When the present period began; None: not known."""
    _planned_at: float = 0.0
    _planned_joins: dict[str, RoundJoin] = field(default_factory=dict)
    _joined_at: dict[str, float] = field(default_factory=dict)
    _since: float = 0.0
    """Waiting does not count before this time."""
    _patience: float = 1.0
    _unwell: set[str] = field(default_factory=set)
    """Who voted against the last attempt of this round."""
    _relay_rounds: int = 0
    _relay_until: int = 0
    _slow_recoveries: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How often a member did not recover in time, and up to which round nobody waits for it."""
    _told_slow: set[str] = field(default_factory=set)

    # ------------------------------------------------------------------- what happened

    def expect(self, member: str) -> None:
        """A process was launched for this member at the start of the job: rounds wait for it."""
        self._forget(member)
        self.standing[member] = "expected"

    def launch(self, member: str) -> None:
        """A process was launched while the job runs: it says itself when it can take part."""
        self._forget(member)
        self.standing[member] = "launched" if self.recovers or not self.starting else "expected"

    def register(self, member: str, *, dial: list[str]) -> None:
        """A member entered the job."""
        self.dials[member] = dial
        if self.standing.get(member) not in ("live", "recovering", "away"):
            fresh = self.recovers and member not in self.stands | self.recorded
            self.standing[member] = "launched" if fresh else "live"

    def back(self, member: str) -> None:
        """The process of a member that was taken for lost speaks again."""
        known = member in self.stands | self.recorded or not self.recovers
        self.standing[member] = "live" if known else "away"

    def join(self, member: str, body: RoundJoin, now: float) -> list[Effect]:
        """A member wants to take part in a round.

        Raises:
            LeftBehind: that round is committed, or cannot be the next one.
        """
        if body.round < self.committed_round:
            self._forget(member)
            self.standing[member] = "away"
            raise left_behind(body.round, self.committed_round)
        if body.round > self.committed_round and not self.unproved:
            raise left_behind(body.round, self.committed_round)
        effects: list[Effect] = []
        if self.attends(member) and self.plan is not None:
            if body.round == self.plan.round:
                self.standing[member] = "live"
                return []
            effects += self._leave_plan(member)
        self.standing[member] = "live"
        if body.round == self.committed_round:
            self._proved(member, body.base)
        self.joins[member] = body
        self._joined_at.setdefault(member, now)
        return effects + self.settle(now)

    def vote(self, member: str, body: RoundVote, now: float) -> list[Effect]:
        """A member tells how its reduce went.

        Raises:
            EpochChanged: the attempt is not the open one (nor one with a known verdict).
            GroupError: the vote cannot be true; :meth:`withdraw` leaves the member out.
        """
        plan = self.plan
        if plan is None or body.epoch != plan.epoch or member not in plan.members:
            raise EpochChanged(
                "this attempt of a round is not open",
                given=f"epoch {body.epoch}",
                expected=f"epoch {plan.epoch}" if plan else "none is open",
                remedy="join the round again",
            )
        if body.round != plan.round or not set(body.contributors) <= set(plan.members):
            raise GroupError(
                "this vote does not belong to its attempt",
                given=f"round {body.round} with {', '.join(body.contributors) or 'nobody'}",
                expected=f"round {plan.round} with members of {', '.join(plan.members)}",
            )
        self.left.discard(member)
        self.standing[member] = "live"
        self.votes.setdefault(member, body)
        return self.settle(now)

    def withdraw(self, member: str, now: float) -> list[Effect]:
        """Leave a member out of the open attempt whose vote was refused."""
        return self._step_aside(member, "away") + self.settle(now)

    def gone(self, member: str, now: float, *, lost: bool = True) -> list[Effect]:
        """A member was lost, replaced by a new process, or (not `lost`) has finished."""
        effects = self._step_aside(member, "gone", tell_members=lost)
        return effects + self.settle(now)

    def leave(self, member: str, now: float) -> list[Effect]:
        """A member told that it leaves: nobody waits for it, and it waits for nobody."""
        effects: list[Effect] = []
        if member in self.joins:
            effects.append(Refused(member, GroupError(LEAVING, given=member)))
        return effects + self.gone(member, now)

    def silent(self, member: str, now: float) -> list[Effect]:
        """Nothing was heard of an awaited member: this round goes on without it."""
        text = f"{member} is silent: round {self.committed_round} goes on without it"
        note = Noted("member-silent", text, member)
        return [note, *self._step_aside(member, "away"), *self.settle(now)]

    def recover(self, member: str, now: float) -> list[Effect]:
        """A member lacks the committed state, and takes it over now."""
        voted = member in self.votes
        effects = [] if voted else self._step_aside(member, "recovering")
        self._forget(member)
        self.standing[member] = "recovering"
        return effects + self.settle(now)

    def stand(self, member: str, round_: int, base: str, now: float) -> list[Effect]:
        """A member has taken over the committed state.

        Raises:
            LeftBehind: another round was committed meanwhile, or its state is another one.
        """
        if round_ != self.committed_round:
            raise left_behind(round_, self.committed_round)
        others = {m: told for m, told in self.bases.items() if m != member}
        if others and majority_base(others) != base:
            raise differs(base, majority_base(others), round_)
        self._proved(member, base)
        self.standing[member] = "live"
        self._slow_recoveries.pop(member, None)
        return self.settle(now)

    def rewind(self, round_: int, cursors: Mapping[int, Cursor]) -> None:
        """Nobody holds the committed state any more: go on from an earlier round."""
        self.committed_round, self.committed_at = round_, None
        self.stands, self.recorded, self.bases, self._unwell = set(), set(), {}, set()
        self._relay_until, self._slow_recoveries, self.unproved = 0, {}, False
        self.leases.set_back(cursors)

    def reducer(self, now: float, *, ready: bool) -> list[Effect]:
        """The job's reducer came or went."""
        self.reducer_ready = ready
        return self.settle(now)

    # ----------------------------------------------------------------------- questions

    @property
    def recovers(self) -> bool:
        """Whether a newcomer takes over the committed state instead of starting afresh."""
        return self.committed_round > self.start_round

    def attends(self, member: str) -> bool:
        """Return whether a member is in the open plan and still counts."""
        return self.plan is not None and member in self.plan.members and member not in self.left

    def waits_for(self) -> list[str]:
        """Return the members without which nothing goes on just now."""
        if self.plan is not None:
            return [m for m in self.plan.members if m not in self.left and m not in self.votes]
        if not self.joins:
            return []
        return [m for m in self._awaited_until() if self.standing[m] != "expected"]

    def holders(self, asker: str, failed: list[str]) -> list[str]:
        """Return who can give the committed state, those that answer now before the others."""
        known = self.stands | self.recorded
        there = [m for m, s in self.standing.items() if s != "gone" and m in known and m != asker]
        near = [m for m in there if self.standing[m] != "away"]
        for choice in (near, there):
            usable = [m for m in choice if m not in failed]
            if usable:
                return sorted(usable, key=slot_of)
        return sorted(there, key=slot_of)

    def grace_s(self) -> float:
        """Return how long joins are waited for after the first one came."""
        return patience.grace_s(self.measures, first_s=self.first_grace_s)

    # ------------------------------------------------------------------ what follows

    def settle(self, now: float) -> list[Effect]:
        """Return everything that follows by now; also to be called as time goes by."""
        return self._decide(now) + self._form(now)

    def reopen(self, plan: RoundPlan, now: float) -> None:
        """Take up an attempt without a verdict that an earlier life of the hub had planned."""
        self.plan, self._planned_at = plan, now
        self.votes, self.left, self._planned_joins = {}, set(), {}

    def _decide(self, now: float) -> list[Effect]:
        plan = self.plan
        if plan is None:
            return []
        effects: list[Effect] = []
        missing = [m for m in plan.members if m not in self.left and m not in self.votes]
        if missing:
            if now < self._planned_at + 1.5 * plan.timeout_s + 15:
                return []
            for member in missing:
                effects += self._leave_out(member, "it did not vote in time")
        effects += self._leave_out_odd_ones()
        verdict = judge(plan, self.votes, self.left)
        seconds = now - self._planned_at
        if verdict.committed:
            verdict, notes = self._commit(plan, verdict, now)
        else:
            notes = self._abort(plan, verdict)
        contributed = [m for m in verdict.contributors if m in self.stands]
        decided = Decided(
            plan, verdict, seconds, self.leases.cursors, self.measures,
            tuple(contributed) if verdict.committed else (),
        )  # fmt: skip
        self.plan, self.votes, self.left = None, {}, set()
        return [*effects, *notes, decided, *self._refuse_late()]

    def _leave_out_odd_ones(self) -> list[Effect]:
        """Let nobody hold up the others twice: neither by another result nor by none."""
        counted = {m: v for m, v in self.votes.items() if m not in self.left}
        effects: list[Effect] = []
        if any(vote.ok for vote in counted.values()):
            for member in [m for m, v in counted.items() if not v.ok and m in self._unwell]:
                effects += self._leave_out(member, counted[member].reason or "not ok twice")
        for member in odd_ones({m: v for m, v in counted.items() if m not in self.left}):
            effects += self._leave_out(member, "its result differs from that of the others")
            text = f"{member} holds another result of round {self.committed_round} than the others"
            effects.append(Noted("result-differs", text, member, alarm=True))
        self._unwell = {m for m, v in counted.items() if not v.ok}
        return effects

    def _commit(
        self, plan: RoundPlan, verdict: Verdict, now: float
    ) -> tuple[Verdict, list[Effect]]:
        """Take a committed round into the books; return the verdict with all that it tells."""
        counted = {m: v for m, v in self.votes.items() if m not in self.left and v.ok}
        measures, seconds = self.measures, now - self._planned_at
        known = measures.duration_s.get(plan.route)
        measures.duration_s[plan.route] = patience.mean(known, seconds)
        if self.committed_at is not None:
            measures.period_s = patience.mean(measures.period_s, now - self.committed_at)
        learn_steps(measures, self._planned_joins)
        self.committed_round, self.committed_at = plan.round + 1, now
        self.stands, self.recorded, self.bases = set(counted), set(), {}
        self.unproved, self._patience, self._unwell = False, 1.0, set()
        if plan.route in ("direct", "hierarchical"):
            self._relay_rounds = 0
        effects = self._take_cursors(verdict)
        trainers = [m for m, s in self.standing.items() if s in ("live", "recovering")]
        dealt = self.leases.renew(trainers) if any(v.lease for v in counted.values()) else {}
        shares = paces(measures.step_s, trainers) if self.paced else {}
        for member, ratio in too_slow(measures.step_s, trainers).items():
            if member not in self._told_slow:
                self._told_slow.add(member)
                text = f"{member} needs {ratio:.1f} times as long for a step as the fastest"
                effects.append(Noted("too-slow", text, member))
        told = Verdict(
            verdict.round, verdict.epoch, True, verdict.digest, verdict.contributors,
            leases=dealt, pace=shares,
        )  # fmt: skip
        return told, effects

    def _take_cursors(self, verdict: Verdict) -> list[Effect]:
        """Note how far the contributors have read; whatever else was read is dealt again."""
        effects: list[Effect] = []
        told = {
            m: v.lease
            for m, v in self.votes.items()
            if v.ok and v.digest == verdict.digest and m in verdict.contributors and v.lease
        }
        for member in sorted(told, key=lambda m: (told[m].slot != slot_of(m), slot_of(m))):
            wrong = self.leases.wrong(member, told[member])
            if wrong:
                text = f"the data position of {member} is refused: {wrong}"
                effects.append(Noted("refused", text, member))
            else:
                self.leases.take_over(member, told[member])
        return effects

    def _abort(self, plan: RoundPlan, verdict: Verdict) -> list[Effect]:
        """Draw the lessons of an aborted attempt."""
        if not self.left:
            self._patience = min(8.0, 2 * self._patience)
            if plan.route in ("direct", "hierarchical"):
                self._relay_rounds = min(MAX_RELAY_ROUNDS, max(2, 2 * self._relay_rounds))
                self._relay_until = self.committed_round + self._relay_rounds
        text = f"round {plan.round} was aborted (epoch {plan.epoch}): {verdict.reason}"
        return [Noted("round-aborted", text, alarm=verdict.reason.startswith(DIFFERENT))]

    def _refuse_late(self) -> list[Effect]:
        """Refuse those who wait to join a round that was committed meanwhile."""
        late = [m for m, join in self.joins.items() if join.round < self.committed_round]
        return [effect for member in late for effect in self._refuse(member)]

    def _refuse(self, member: str) -> list[Effect]:
        error = left_behind(self.joins[member].round, self.committed_round)
        return [Refused(member, error), *self._step_aside(member, "away")]

    # ------------------------------------------------------------------ the next attempt

    def _form(self, now: float) -> list[Effect]:
        if self.plan is not None or not self.joins:
            return []
        effects = self._settle_ahead(now)
        if not self.joins or any(j.round > self.committed_round for j in self.joins.values()):
            return effects
        short = shortage(len(present(self.standing, self.joins)), self.min_nodes)
        if short:
            return effects + self._pause(short)
        effects += self._unpause(now)
        until = self._awaited_until()
        if any(now < deadline for deadline in until.values()) or self._too_few_to_start(now):
            return effects
        for member in until:
            effects += self._give_up_waiting(member)
        effects += self._refuse_different()
        short = shortage(len(self.joins), self.min_nodes)
        if short:
            return effects + self._pause(short)
        route = choose_route(
            self.preference, self.joins, self.dials,
            relay_only=self.committed_round < self._relay_until,
        )  # fmt: skip
        if route.needs_reducer and not self.reducer_ready:
            return effects
        return [*effects, self._make_plan(route, now)]

    def _settle_ahead(self, now: float) -> list[Effect]:
        """See whether the record is behind the members, or a member ahead of the group."""
        ahead = ahead_of(self.joins, self.committed_round)
        if ahead is None:
            return []
        everyone = [m for m, j in self.joins.items() if j.round > self.committed_round]
        if len(everyone) < len(self.joins) or self.stands - set(everyone):
            self.unproved = False
            return [effect for member in everyone for effect in self._refuse(member)]
        missing = [m for m, s in self.standing.items() if s in AWAITED and m not in self.joins]
        late = now >= self._waiting_since() + self.grace_s()
        if missing and (not late or len(ahead.members) < 2):
            return []
        text = (
            f"the record ends at round {self.committed_round}, but {', '.join(ahead.members)}"
            f" stand on round {ahead.round}: it is taken over from them"
        )
        self.committed_round, self.unproved, self.starting = ahead.round, False, False
        self.epoch += EPOCH_LEAP
        self.stands, self.recorded = set(ahead.members), set()
        self.bases = dict.fromkeys(ahead.members, ahead.base)
        self.leases.held = {}
        odd = [m for m in ahead.others if self.joins[m].round != ahead.round]
        refused = [effect for member in odd for effect in self._refuse(member)]
        return [Adopted(ahead.round), Noted("adopted", text, alarm=True), *refused]

    def _waiting_since(self) -> float:
        return max(min(self._joined_at.values()), self._since)

    def _awaited_until(self) -> dict[str, float]:
        """Return, for every member that the next plan waits for, until when."""
        since, until = self._waiting_since(), {}
        for member, standing in self.standing.items():
            if member in self.joins:
                continue
            if standing in AWAITED:
                until[member] = since + self.grace_s()
            elif standing == "recovering":
                _, skipped = self._slow_recoveries.get(member, (0, 0))
                if self.committed_round >= skipped:
                    until[member] = since + patience.hold_s(self.measures)
        return until

    def _too_few_to_start(self, now: float) -> bool:
        least = self.min_nodes or self.nodes_wanted
        waiting = now < self._waiting_since() + self.first_grace_s
        return self.starting and len(self.joins) < least and waiting

    def _give_up_waiting(self, member: str) -> list[Effect]:
        if self.standing[member] != "recovering":
            return self._leave_out(member, "it did not join in time")
        times = self._slow_recoveries.get(member, (0, 0))[0] + 1
        self._slow_recoveries[member] = (times, self.committed_round + 2 ** min(times, 6))
        text = f"{member} takes over the state too slowly: round {self.committed_round} goes on"
        return [Noted("too-slow-to-recover", text, member)]

    def _refuse_different(self) -> list[Effect]:
        """Let those go on that stand on what most stand on; the others must heal first."""
        base = majority_base({m: join.base for m, join in self.joins.items()})
        effects: list[Effect] = []
        for member in [m for m, join in self.joins.items() if join.base != base]:
            error = differs(self.joins[member].base, base, self.committed_round)
            text = f"{member} differs from the other replicas at round {self.committed_round}"
            effects += [Refused(member, error), Noted("replica-differs", text, member, alarm=True)]
            effects += self._step_aside(member, "away")
            self._forget(member)
        return effects

    def _pause(self, short: str) -> list[Effect]:
        if self.paused == short:
            return []
        self.paused, self.committed_at = short, None
        return [Held(short), Noted("paused", f"paused: {short}")]

    def _unpause(self, now: float) -> list[Effect]:
        if not self.paused:
            return []
        self.paused, self._since = "", now
        return [Held(""), Noted("unpaused", "enough members are there: the run goes on")]

    def _make_plan(self, route: Route, now: float) -> Planned:
        members = sorted(self.joins, key=slot_of)
        times = [max(self._joined_at[m], self._since) for m in members]
        busy = [join.busy_s for join in self.joins.values()]
        if self.starting and all(busy):
            times = busy  # processes start at different times, which says nothing of later rounds
        patience.learn_spread(self.measures, max(times) - min(times))
        self.epoch += 1
        self.starting = False
        self.plan = RoundPlan(
            job=self.job,
            round=self.committed_round,
            epoch=self.epoch,
            members=members,
            route=route.name,
            reducer=session_id(self.job, "reducer") if route.needs_reducer else "",
            store=route.store,
            timeout_s=patience.timeout_s(self.measures, route.name, patience=self._patience),
            stopping=self.stopping,
            sites=route.sites,
            stores=route.stores,
        )
        self._planned_at, self._planned_joins = now, self.joins
        self.votes, self.left = {}, set()
        self.joins, self._joined_at = {}, {}
        return Planned(self.plan)

    # ------------------------------------------------------------------ single members

    def _leave_out(self, member: str, why: str) -> list[Effect]:
        text = f"{member} is left out of round {self.committed_round}: {why}"
        return [*self._step_aside(member, "away"), Noted("member-left-out", text, member)]

    def _step_aside(
        self, member: str, standing: Standing, *, tell_members: bool = True
    ) -> list[Effect]:
        """Stop waiting for a member; in an open plan the reducer and the others are told."""
        self.standing[member] = standing
        self.joins.pop(member, None)
        self._joined_at.pop(member, None)
        return self._leave_plan(member, tell_members=tell_members)

    def _leave_plan(self, member: str, *, tell_members: bool = True) -> list[Effect]:
        if self.plan is None or not self.attends(member):
            return []
        self.left.add(member)
        return [Lost(self.plan, member, tell_members)]

    def _forget(self, member: str) -> None:
        """A member stands on nothing that others could take over."""
        self.stands.discard(member)
        self.recorded.discard(member)
        self.bases.pop(member, None)

    def _proved(self, member: str, base: str) -> None:
        """A member showed that it stands on the committed state."""
        self.stands.add(member)
        self.bases[member] = base
        self.unproved = False
