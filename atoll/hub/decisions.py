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

from atoll.errors import GroupError
from atoll.hub import measures as patience
from atoll.hub.attempt import Attempt, not_open
from atoll.hub.effects import Adopted, Decided, Effect, Held, Noted, Planned, Refused
from atoll.hub.forming import LEAVING, Ahead, ahead_of, differs, left_behind, shortage
from atoll.hub.leases import Cursor
from atoll.hub.lobby import Lobby
from atoll.hub.progress import Progress
from atoll.hub.roll import Roll, Standing, present
from atoll.hub.sites import Route, choose_route, make_plan
from atoll.hub.verdicts import DIFFERENT, ODD, judge, majority_base, outvoted
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict

EPOCH_LEAP = 1_000_000
"""Epochs skipped when a round is adopted: those that the lost record gave out are not known."""

EMPTY_S = 2.0
"""A job without members for this long is paused; one that ends is over by then."""


@dataclass
class JobRounds:
    """Where the rounds of one job stand. Times are monotonic seconds handed in as `now`."""

    job: str
    nodes_wanted: int
    min_nodes: int = 0
    """With fewer members the run pauses; 0: one is enough."""
    preference: str = "auto"
    """`auto`, `direct` or `relay`."""
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
    progress: Progress = field(default_factory=Progress)
    roll: Roll = field(default_factory=Roll)
    dials: dict[str, list[str]] = field(default_factory=dict)
    attempt: Attempt | None = None
    """The attempt that awaits its verdict."""
    lobby: Lobby = field(default_factory=Lobby)
    """Members that wait for the next plan."""
    _empty_at: float | None = None
    """Since when nobody is there."""
    _unwell: set[str] = field(default_factory=set)
    """Who voted against the last attempt of this round."""

    # ------------------------------------------------------------------- what happened

    def expect(self, member: str) -> None:
        """A process was launched for this member at the start of the job: rounds wait for it."""
        self.roll.begin(member, "expected")

    def launch(self, member: str) -> None:
        """A process was launched while the job runs: it says itself when it can take part."""
        self.roll.begin(member, "expected" if self.starting else "launched")

    def register(self, member: str, *, dial: list[str]) -> None:
        """A member entered the job."""
        self.dials[member] = dial
        if self.roll.standing.get(member) not in ("live", "recovering", "away"):
            fresh = self.recovers and not self.roll.knows(member)
            self.roll.standing[member] = "launched" if fresh else "live"

    def back(self, member: str) -> None:
        """The process of a member that was taken for lost speaks again."""
        known = self.roll.knows(member) or not self.recovers
        self.roll.standing[member] = "live" if known else "away"

    def join(self, member: str, body: RoundJoin, now: float) -> list[Effect]:
        """A member wants to take part in a round.

        Raises:
            LeftBehind: that round is committed, or cannot be the next one.
            GroupError: the member is leaving.
        """
        if member in self.roll.leaving:
            raise GroupError(LEAVING, given=member)
        self.lobby.learn_late(member, body.round, now, self.progress.measures)
        late = body.round < self.committed_round
        if late or (body.round > self.committed_round and not self.unproved):
            if not self.roll.knows(member):
                self.roll.standing[member] = "away"
            raise left_behind(body.round, self.committed_round)
        effects: list[Effect] = []
        if self.attempt is not None and self.attempt.attends(member):
            if body.round == self.attempt.plan.round:
                self.roll.standing[member] = "live"
                return []
            effects += self.attempt.leave(member)
        self.roll.standing[member] = "live"
        if body.round == self.committed_round:
            self._proved(member, body.base)
        self.lobby.enter(member, body, now)
        return effects + self.settle(now)

    def vote(self, member: str, body: RoundVote, now: float) -> list[Effect]:
        """A member tells how its reduce went.

        Raises:
            EpochChanged: the attempt is not the open one (nor one with a known verdict).
            GroupError: the vote cannot be true; :meth:`withdraw` leaves the member out.
        """
        attempt = self.attempt
        if attempt is None or body.epoch != attempt.plan.epoch:
            raise not_open(body.epoch, attempt)
        if member not in attempt.plan.members:
            raise not_open(body.epoch, None)
        attempt.take(member, body)
        self.roll.standing[member] = "live"
        return self.settle(now)

    def withdraw(self, member: str, now: float) -> list[Effect]:
        """Leave a member out of the open attempt whose vote was refused."""
        return self._step_aside(member, "away") + self.settle(now)

    def gone(self, member: str, now: float, *, lost: bool = True) -> list[Effect]:
        """A member was lost, replaced by a new process, or (not `lost`) has finished."""
        self.roll.finished = self.roll.finished or not lost
        effects = self._step_aside(member, "gone", tell_members=lost)
        return effects + self.settle(now)

    def leave(self, member: str, now: float) -> list[Effect]:
        """A member told that it leaves: nobody waits for it, and it waits for nobody."""
        effects: list[Effect] = []
        if member in self.joins:
            effects.append(Refused(member, GroupError(LEAVING, given=member)))
        self.roll.leaving.add(member)
        return effects + self.gone(member, now)

    def silent(self, member: str, now: float) -> list[Effect]:
        """Nothing was heard of an awaited member: this round goes on without it."""
        text = f"{member} is silent: round {self.committed_round} goes on without it"
        note = Noted("member-silent", text, member)
        return [note, *self._step_aside(member, "away"), *self.settle(now)]

    def recover(self, member: str, now: float) -> list[Effect]:
        """A member lacks the committed state, and takes it over now."""
        effects: list[Effect] = []
        if self.attempt is None or member not in self.attempt.votes:
            effects = self._step_aside(member, "recovering")
        self.roll.forget(member)
        self.roll.standing[member] = "recovering"
        return effects + self.settle(now)

    def stand(self, member: str, round_: int, base: str, now: float) -> list[Effect]:
        """A member has taken over the committed state.

        Raises:
            LeftBehind: another round was committed meanwhile, or its state is another one.
        """
        if round_ != self.committed_round:
            raise left_behind(round_, self.committed_round)
        others = {m: told for m, told in self.roll.bases.items() if m != member}
        if others and majority_base(others) != base:
            raise differs(base, majority_base(others), round_)
        self._proved(member, base)
        self.roll.recovered(member)
        return self.settle(now)

    def rewind(self, round_: int, cursors: Mapping[int, Cursor]) -> None:
        """Nobody holds the committed state any more: go on from an earlier round."""
        self.committed_round, self.unproved, self._unwell = round_, False, set()
        self.start_round = min(self.start_round, round_)
        self.roll.set_back()
        self.progress.set_back(cursors)

    def reducer(self, now: float, *, ready: bool) -> list[Effect]:
        """The job's reducer came or went."""
        self.reducer_ready = ready
        return self.settle(now)

    # ----------------------------------------------------------------------- questions

    @property
    def plan(self) -> RoundPlan | None:
        """The plan of the attempt that awaits its verdict."""
        return self.attempt.plan if self.attempt is not None else None

    @property
    def joins(self) -> dict[str, RoundJoin]:
        """What the members told that wait for the next plan."""
        return self.lobby.joins

    @property
    def recovers(self) -> bool:
        """Whether a newcomer takes over the committed state instead of starting afresh."""
        return self.committed_round > self.start_round

    def attends(self, member: str) -> bool:
        """Return whether a member is in the open plan and still counts."""
        return self.attempt is not None and self.attempt.attends(member)

    def waits_for(self) -> list[str]:
        """Return the members that have spoken before and without which nothing goes on just now."""
        if self.attempt is not None:
            return self.attempt.missing()
        if not self.joins:
            return []
        return [m for m in self._awaited_until() if self.roll.standing[m] != "expected"]

    def grace_s(self) -> float:
        """Return how long joins are waited for after the first one came."""
        return patience.grace_s(self.progress.measures, first_s=self.first_grace_s)

    # ------------------------------------------------------------------ what follows

    def settle(self, now: float) -> list[Effect]:
        """Return everything that follows by now; also to be called as time goes by."""
        return self._decide(now) + self._form(now)

    def reopen(self, plan: RoundPlan, now: float) -> None:
        """Take up an attempt without a verdict that an earlier life of the hub had planned."""
        self.attempt = Attempt(plan, now)

    def _decide(self, now: float) -> list[Effect]:
        attempt = self.attempt
        if attempt is None or (attempt.missing() and not attempt.overdue(now)):
            return []
        effects: list[Effect] = []
        for member in attempt.missing():
            effects += self._leave_out(member, "it did not vote in time")
        effects += self._leave_out_odd_ones(attempt)
        verdict = judge(attempt.plan, attempt.votes, attempt.left)
        if verdict.committed:
            verdict, notes = self._commit(attempt, verdict, now)
            effects += notes
        else:
            effects.append(self._abort(attempt, verdict))
        self.attempt = None
        effects.append(self._decided(attempt, verdict, now))
        late = [m for m, join in self.joins.items() if join.round < self.committed_round]
        return effects + [effect for member in late for effect in self._refuse(member)]

    def _decided(self, attempt: Attempt, verdict: Verdict, now: float) -> Decided:
        progress = self.progress
        contributed = [m for m in verdict.contributors if m in self.roll.stands]
        return Decided(
            attempt.plan,
            verdict,
            now - attempt.planned_at,
            dict(progress.leases.cursors),
            progress.measures,
            tuple(contributed) if verdict.committed else (),
        )

    def _leave_out_odd_ones(self, attempt: Attempt) -> list[Effect]:
        """Let nobody hold up the others twice: neither by another result nor by none."""
        effects: list[Effect] = []
        for member, why in outvoted(attempt.counted(), self._unwell).items():
            effects += self._leave_out(member, why)
            if why == ODD:
                text = f"{member} holds another result of round {self.committed_round}"
                effects.append(Noted("result-differs", text, member, alarm=True))
        self._unwell = {m for m, vote in attempt.votes.items() if not vote.ok}
        return effects

    def _commit(
        self, attempt: Attempt, verdict: Verdict, now: float
    ) -> tuple[Verdict, list[Noted]]:
        self.committed_round = attempt.plan.round + 1
        self.unproved, self._unwell = False, set()
        self.roll.committed(attempt.counted())
        return self.progress.commit(attempt, verdict, self.roll.trainers(), now)

    def _abort(self, attempt: Attempt, verdict: Verdict) -> Noted:
        self.progress.abort(attempt)
        text = f"round {verdict.round} was aborted (epoch {verdict.epoch}): {verdict.reason}"
        return Noted("round-aborted", text, alarm=verdict.reason.startswith(DIFFERENT))

    # ------------------------------------------------------------------ the next attempt

    def _form(self, now: float) -> list[Effect]:
        if self.attempt is not None:
            return []
        if not self.joins:
            return self._see_if_empty(now)
        effects = self._settle_ahead(now)
        if not self.joins or any(j.round > self.committed_round for j in self.joins.values()):
            return effects
        short = shortage(len(present(self.roll, self.joins)), self.min_nodes)
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
        relay_only = self.progress.relay_only(self.committed_round)
        route = choose_route(self.preference, self.joins, self.dials, relay_only=relay_only)
        if route.needs_reducer and not self.reducer_ready:
            return effects
        return [*effects, self._make_plan(route, now)]

    def _settle_ahead(self, now: float) -> list[Effect]:
        """See whether the record is behind the members, or a member ahead of the group."""
        ahead = ahead_of(self.joins, self.committed_round)
        if ahead is None:
            return []
        claims = [m for m, j in self.joins.items() if j.round > self.committed_round]
        if len(claims) < len(self.joins) or self.roll.stands - set(claims):
            self.unproved = False
            return [effect for member in claims for effect in self._refuse(member)]
        missing = set(self.roll.awaited()) - set(claims)
        if missing and (now < self.lobby.since() + self.grace_s() or len(claims) < 2):
            return []
        return self._adopt(ahead)

    def _adopt(self, ahead: Ahead) -> list[Effect]:
        """Take the committed round over from the members."""
        text = (
            f"the record ends at round {self.committed_round}, but {', '.join(ahead.members)}"
            f" stand on round {ahead.round}: it is taken over from them"
        )
        self.committed_round, self.unproved, self.starting = ahead.round, False, False
        self.epoch += EPOCH_LEAP
        self.roll.committed(ahead.members)
        self.roll.bases = dict.fromkeys(ahead.members, ahead.base)
        self.progress.leases.held = {}
        odd = [m for m, join in self.joins.items() if join.round != ahead.round]
        refused = [effect for member in odd for effect in self._refuse(member)]
        return [Adopted(ahead.round), Noted("adopted", text, alarm=True), *refused]

    def _see_if_empty(self, now: float) -> list[Effect]:
        """Say that nobody is left, unless that is how the job ends."""
        if not self.roll.all_gone():
            self._empty_at = None
            return []
        self._empty_at = now if self._empty_at is None else self._empty_at
        if now < self._empty_at + EMPTY_S:
            return []
        return self._pause(shortage(0, max(1, self.min_nodes)))

    def _awaited_until(self) -> dict[str, float]:
        """Return, for every member that the next plan waits for, until when."""
        since = self.lobby.since()
        until = dict.fromkeys(self.roll.awaited(), since + self.grace_s())
        held = since + patience.hold_s(self.progress.measures)
        until |= dict.fromkeys(self.roll.recovering(self.committed_round), held)
        return {m: deadline for m, deadline in until.items() if m not in self.joins}

    def _too_few_to_start(self, now: float) -> bool:
        least = self.min_nodes or self.nodes_wanted
        waiting = now < self.lobby.since() + self.first_grace_s
        return self.starting and len(self.joins) < least and waiting

    def _give_up_waiting(self, member: str) -> list[Effect]:
        if self.roll.standing[member] != "recovering":
            self.lobby.late.add(member)
            return self._leave_out(member, "it did not join in time")
        self.roll.too_slow(member, self.committed_round)
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
            self.roll.forget(member)
        return effects

    def _pause(self, short: str) -> list[Effect]:
        if self.paused == short:
            return []
        self.paused, self.progress.committed_at = short, None
        return [Held(short), Noted("paused", f"paused: {short}")]

    def _unpause(self, now: float) -> list[Effect]:
        if not self.paused:
            return []
        self.paused, self.lobby.not_before = "", now
        return [Held(""), Noted("unpaused", "enough members are there: the run goes on")]

    def _make_plan(self, route: Route, now: float) -> Planned:
        spread_s = self.lobby.spread_s(starting=self.starting)
        patience.learn_spread(self.progress.measures, spread_s)
        self.epoch += 1
        self.starting = False
        plan = make_plan(
            route,
            job=self.job,
            round_=self.committed_round,
            epoch=self.epoch,
            members=self.lobby.members(),
            timeout_s=self.progress.timeout_s(route.name),
            stopping=self.stopping,
        )
        self.attempt = Attempt(plan, now, self.lobby.leave_for(plan.round))
        return Planned(plan)

    # ------------------------------------------------------------------ single members

    def _refuse(self, member: str) -> list[Effect]:
        error = left_behind(self.joins[member].round, self.committed_round)
        return [Refused(member, error), *self._step_aside(member, "away")]

    def _leave_out(self, member: str, why: str) -> list[Effect]:
        text = f"{member} is left out of round {self.committed_round}: {why}"
        return [*self._step_aside(member, "away"), Noted("member-left-out", text, member)]

    def _step_aside(
        self, member: str, standing: Standing, *, tell_members: bool = True
    ) -> list[Effect]:
        """Stop waiting for a member; in an open plan the reducer and the others are told."""
        self.roll.standing[member] = standing
        self.lobby.leave(member)
        if self.attempt is None:
            return []
        return list(self.attempt.leave(member, tell_members=tell_members))

    def _proved(self, member: str, base: str) -> None:
        self.roll.proved(member, base)
        self.unproved = False
