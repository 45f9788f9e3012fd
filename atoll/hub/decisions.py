"""The rules of a round, without sockets, files or a clock: who meets, and what was decided.

A round is join -> reduce -> commit. :class:`JobRounds` is told what happened (a member joined,
voted, was lost; time went by) and returns what follows. It never acts: whoever calls it makes each
consequence durable before anyone hears of it (see `rounds.py`).

The transaction is that of two-phase commit (Gray, "Notes on data base operating systems", 1978)
with a coordinator that never waits for a dead participant: a member that is lost before it voted is
left out, and finds on its return that the group went on without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from atoll.errors import EpochChanged, GroupError, LeftBehind
from atoll.ids import session_id, slot_of
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict

Standing = Literal["expected", "live", "gone"]

FIRST_TIMEOUT_S = 120.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 10.0, 300.0
EMA = 0.3
"""Weight of the newest measurement in the running means of spread and duration."""


@dataclass(frozen=True)
class Planned:
    """A plan was made: store it, tell the reducer, answer the members."""

    plan: RoundPlan


@dataclass(frozen=True)
class Decided:
    """A verdict was reached: store it, answer the voters, tell the reducer."""

    plan: RoundPlan
    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class Refused:
    """A member that waits to join must not take part."""

    member: str
    error: GroupError


@dataclass(frozen=True)
class Noted:
    """Something people should know; `alarm`: it should not happen at all."""

    kind: str
    text: str
    member: str = ""
    alarm: bool = False


Effect = Planned | Decided | Refused | Noted


def majority_base(bases: Mapping[str, str]) -> str:
    """Return the digest that most members stand on; in a tie, that of the lowest slot."""
    counts = Counter(bases.values())
    most = max(counts.values())
    return next(bases[m] for m in sorted(bases, key=slot_of) if counts[bases[m]] == most)


def all_reachable(joins: Mapping[str, RoundJoin]) -> bool:
    """Return whether every member can dial every other one."""
    return all(set(join.reachable) | {me} >= joins.keys() for me, join in joins.items())


def judge(plan: RoundPlan, votes: Mapping[str, RoundVote], left: Iterable[str]) -> Verdict:
    """Return the verdict on an attempt: all remaining votes are ok and agree, or it is aborted.

    Args:
        plan: The attempt.
        votes: What each member voted.
        left: Members that no longer count, whether they voted or not.
    """
    counted = {m: votes[m] for m in plan.members if m in votes and m not in set(left)}
    unwell = [f"{m}: {vote.reason or 'not ok'}" for m, vote in counted.items() if not vote.ok]
    digests = {vote.digest for vote in counted.values()}
    if not counted:
        reason = "every member was lost before it voted"
    elif unwell:
        reason = "; ".join(unwell)
    elif len(digests) > 1:
        reason = "members hold different results: " + ", ".join(
            f"{m} {vote.digest[:8]}" for m, vote in counted.items()
        )
    else:
        first = next(iter(counted.values()))
        return Verdict(plan.round, plan.epoch, True, first.digest, first.contributors)
    return Verdict(plan.round, plan.epoch, False, reason=reason)


@dataclass
class JobRounds:
    """Where the rounds of one job stand. Times are monotonic seconds handed in as `now`."""

    job: str
    nodes_wanted: int
    preference: str = "auto"
    """`auto`, `direct` or `relay`."""
    committed_round: int = 0
    """Rounds committed so far: the next one to join."""
    epoch: int = 0
    """The last epoch given out, in any life of the hub."""
    first_grace_s: float = 120.0
    """How long the first round waits for members that are still starting."""
    starting: bool = True
    """No round was planned since the job started: wait for every member that is wanted."""
    stopping: bool = False
    reducer_ready: bool = False
    standing: dict[str, Standing] = field(default_factory=dict)
    dials: dict[str, list[str]] = field(default_factory=dict)
    plan: RoundPlan | None = None
    """The attempt that awaits its verdict."""
    left: set[str] = field(default_factory=set)
    """Members of the plan that are not waited for any more."""
    votes: dict[str, RoundVote] = field(default_factory=dict)
    joins: dict[str, RoundJoin] = field(default_factory=dict)
    """Members that wait for the next plan."""
    _planned_at: float = 0.0
    _joined_at: dict[str, float] = field(default_factory=dict)
    _spread_s: float | None = None
    _duration_s: float | None = None
    _patience: float = 1.0
    _direct_failed: bool = False

    # ------------------------------------------------------------------- what happened

    def expect(self, member: str) -> None:
        """A process was launched for this member: rounds wait for it."""
        self.standing[member] = "expected"

    def register(self, member: str, *, dial: list[str]) -> None:
        """A member entered the job."""
        self.standing[member] = "live"
        self.dials[member] = dial

    def join(self, member: str, body: RoundJoin, now: float) -> list[Effect]:
        """A member wants to take part in a round.

        Raises:
            LeftBehind: that round is committed.
            GroupError: that round cannot be next.
        """
        if body.round < self.committed_round:
            raise self._left_behind(body.round)
        if body.round > self.committed_round:
            raise GroupError(
                "this round is not the next one",
                given=f"round {body.round}",
                expected=f"round {self.committed_round}",
            )
        self.standing[member] = "live"
        if self.attends(member):
            return []
        self.joins[member] = body
        self._joined_at.setdefault(member, now)
        return self.settle(now)

    def vote(self, member: str, body: RoundVote, now: float) -> list[Effect]:
        """A member tells how its reduce went.

        Raises:
            EpochChanged: the attempt is not the open one (nor one with a known verdict).
        """
        if self.plan is None or body.epoch != self.plan.epoch or member not in self.plan.members:
            raise EpochChanged(
                "this attempt of a round is not open",
                given=f"epoch {body.epoch}",
                expected=f"epoch {self.plan.epoch}" if self.plan else "none is open",
                remedy="join the round again",
            )
        self.left.discard(member)
        self.standing[member] = "live"
        self.votes.setdefault(member, body)
        return self.settle(now)

    def gone(self, member: str, now: float) -> list[Effect]:
        """A member was lost, replaced by a new process, or has finished."""
        self.standing[member] = "gone"
        self._forget_join(member)
        if self.plan is not None and member in self.plan.members:
            self.left.add(member)
        return self.settle(now)

    def reducer(self, now: float, *, ready: bool) -> list[Effect]:
        """The job's reducer came or went."""
        self.reducer_ready = ready
        return self.settle(now)

    # ----------------------------------------------------------------------- questions

    def attends(self, member: str) -> bool:
        """Return whether a member is in the open plan and still counts."""
        return self.plan is not None and member in self.plan.members and member not in self.left

    def grace_s(self) -> float:
        """Return how long joins are waited for after the first one came."""
        return self.first_grace_s if self._spread_s is None else 3 * self._spread_s + 10

    def timeout_s(self) -> float:
        """Return how long a reduce may take, from the measured ones."""
        if self._duration_s is None:
            usual = FIRST_TIMEOUT_S
        else:
            usual = max(MIN_TIMEOUT_S, 4 * self._duration_s + MIN_TIMEOUT_S)
        return min(MAX_TIMEOUT_S, usual * self._patience)

    # ------------------------------------------------------------------ what follows

    def settle(self, now: float) -> list[Effect]:
        """Return everything that follows by now; also to be called as time goes by."""
        return self._decide(now) + self._form(now)

    def reopen(self, plan: RoundPlan, now: float) -> None:
        """Take up an attempt without a verdict that an earlier life of the hub had planned."""
        self.plan, self._planned_at = plan, now
        self.votes, self.left = {}, set()

    def _decide(self, now: float) -> list[Effect]:
        plan = self.plan
        if plan is None:
            return []
        effects: list[Effect] = []
        silent = [m for m in plan.members if m not in self.left and m not in self.votes]
        if silent:
            if now < self._planned_at + 2 * plan.timeout_s + 30:
                return []
            for member in silent:
                effects.append(self._evict(member, "it did not vote in time"))
            self.left.update(silent)
        verdict = judge(plan, self.votes, self.left)
        seconds = now - self._planned_at
        self._learn(plan, verdict, seconds)
        if not verdict.committed:
            differs = verdict.reason.startswith("members hold different")
            text = f"round {plan.round} was aborted (epoch {plan.epoch}): {verdict.reason}"
            effects.append(Noted("round-aborted", text, alarm=differs))
        self.plan, self.votes, self.left = None, {}, set()
        effects.append(Decided(plan, verdict, seconds))
        return effects + self._refuse_late()

    def _learn(self, plan: RoundPlan, verdict: Verdict, seconds: float) -> None:
        """Update measurements and the choice of route from a verdict."""
        if verdict.committed:
            self.committed_round = plan.round + 1
            self._duration_s = _mean(self._duration_s, seconds)
            self._patience = 1.0
        elif not self.left:
            self._patience = min(8.0, 2 * self._patience)
            self._direct_failed = self._direct_failed or plan.route == "direct"

    def _refuse_late(self) -> list[Effect]:
        """Refuse those who wait to join a round that was committed meanwhile."""
        late = [m for m, join in self.joins.items() if join.round < self.committed_round]
        effects: list[Effect] = []
        for member in late:
            effects.append(Refused(member, self._left_behind(self.joins[member].round)))
            self._forget_join(member)
            self.standing[member] = "gone"
        return effects

    def _form(self, now: float) -> list[Effect]:
        if self.plan is not None or not self.joins:
            return []
        effects: list[Effect] = []
        awaited = [m for m, s in self.standing.items() if s != "gone" and m not in self.joins]
        starting = self.starting and len(self.joins) < self.nodes_wanted
        if awaited or starting:
            if now < min(self._joined_at.values()) + self.grace_s():
                return []
            effects += [self._evict(member, "it did not join in time") for member in awaited]
        effects += self._refuse_different()
        members = sorted(self.joins, key=slot_of)
        route = self._route(members)
        if route == "relay" and not self.reducer_ready:
            return effects
        return [*effects, self._make_plan(members, route, now)]

    def _refuse_different(self) -> list[Effect]:
        """Let those go on that stand on what most stand on; the others must heal first."""
        base = majority_base({m: join.base for m, join in self.joins.items()})
        effects: list[Effect] = []
        for member in [m for m, join in self.joins.items() if join.base != base]:
            error = LeftBehind(
                "your replica differs from that of the group",
                given=f"digest {self.joins[member].base[:16]}",
                expected=f"{base[:16]} after committed round {self.committed_round}",
                remedy="load the newest checkpoint and join again",
            )
            text = f"{member} differs from the other replicas at round {self.committed_round}"
            effects += [Refused(member, error), Noted("replica-differs", text, member, alarm=True)]
            self._forget_join(member)
            self.standing[member] = "gone"
        return effects

    def _route(self, members: list[str]) -> str:
        if len(members) == 1:
            return "alone"
        dialable = bool(self.dials.get(members[0]))
        if self.preference == "direct" and dialable:
            return "direct"
        if self.preference == "auto" and dialable and not self._direct_failed:
            return "direct" if all_reachable(self.joins) else "relay"
        return "relay"

    def _make_plan(self, members: list[str], route: str, now: float) -> Planned:
        times = [self._joined_at[m] for m in members]
        self._spread_s = _mean(self._spread_s, max(times) - min(times))
        self.epoch += 1
        self.starting = False
        self.plan = RoundPlan(
            job=self.job,
            round=self.committed_round,
            epoch=self.epoch,
            members=members,
            route=route,
            reducer=session_id(self.job, "reducer") if route == "relay" else "",
            store=self.dials[members[0]][0] if route == "direct" else "",
            timeout_s=self.timeout_s(),
            stopping=self.stopping,
        )
        self._planned_at = now
        self.votes, self.left = {}, set()
        self.joins, self._joined_at = {}, {}
        return Planned(self.plan)

    def _evict(self, member: str, why: str) -> Noted:
        self.standing[member] = "gone"
        self._forget_join(member)
        text = f"{member} is left out of round {self.committed_round}: {why}"
        return Noted("member-left-out", text, member)

    def _forget_join(self, member: str) -> None:
        self.joins.pop(member, None)
        self._joined_at.pop(member, None)

    def _left_behind(self, round_: int) -> LeftBehind:
        return LeftBehind(
            "the group went on without this member",
            given=f"round {round_}",
            expected=f"committed round {self.committed_round}",
            remedy="load the newest checkpoint and join again",
        )


def _mean(old: float | None, new: float) -> float:
    """Return the running mean with one more measurement in it."""
    return new if old is None else (1 - EMA) * old + EMA * new
