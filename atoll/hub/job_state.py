"""Where the rounds of one job stand, and how a single member is set aside."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.hub import measures as patience
from atoll.hub.attempt import Attempt
from atoll.hub.effects import Effect, Noted, Refused
from atoll.hub.forming import left_behind
from atoll.hub.lobby import Lobby
from atoll.hub.progress import Progress
from atoll.hub.roll import Roll, Standing
from atoll.wire.messages import RoundJoin, RoundPlan


@dataclass
class JobState:
    """The rounds of one job. Times are monotonic seconds handed in as `now`."""

    job: str
    nodes_wanted: int
    min_nodes: int = 0
    """With fewer members the run pauses; 0: one is enough."""
    aside: frozenset[str] = frozenset()
    """Members of the job that take no part in rounds, and that no round waits for."""
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
    aborted: Attempt | None = None
    """The last attempt of this round, if it was aborted."""
    empty_at: float | None = None
    """Since when nobody is there."""
    unwell: set[str] = field(default_factory=set)
    """Who voted against the last attempt of this round."""

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

    def grace_s(self) -> float:
        """Return how long joins are waited for after the first one came."""
        return patience.grace_s(self.progress.measures, first_s=self.first_grace_s)

    def awaited_until(self) -> dict[str, float]:
        """Return, for every member that the next plan waits for, until when.

        Joins of others must have come. A member that takes over the state, or has just done so,
        has a time of its own.
        """
        since, hold_s = self.lobby.since(), patience.hold_s(self.progress.measures)
        until: dict[str, float] = {}
        for member in self.roll.awaited():
            ready_at = min(self.roll.ready_at.get(member, 0.0), since + hold_s)
            until[member] = max(since + self.grace_s(), ready_at)
        for member in self.roll.recovering(self.committed_round):
            asked_at = self.roll.asked_at.get(member, since)
            until[member] = min(asked_at + hold_s, since + 1.5 * hold_s)
        return {m: deadline for m, deadline in until.items() if m not in self.joins}

    def waits_for(self) -> list[str]:
        """Return the members that have spoken before and without which nothing goes on just now."""
        if self.attempt is not None:
            return self.attempt.missing()
        if not self.joins:
            return []
        return [m for m in self.awaited_until() if self.roll.standing[m] != "expected"]

    # ------------------------------------------------------------------ single members

    def refuse(self, member: str) -> list[Effect]:
        """Let a member that waits for another round than the next one recover."""
        error = left_behind(self.joins[member].round, self.committed_round)
        return [Refused(member, error), *self.step_aside(member, "away")]

    def leave_out(self, member: str, why: str) -> list[Effect]:
        """Go on without a member, and say so."""
        text = f"{member} is left out of round {self.committed_round}: {why}"
        return [*self.step_aside(member, "away"), Noted("member-left-out", text, member)]

    def step_aside(
        self, member: str, standing: Standing, *, tell_members: bool = True
    ) -> list[Effect]:
        """Stop waiting for a member; in an open plan the reducer and the others are told."""
        self.roll.standing[member] = standing
        self.lobby.leave(member)
        if self.attempt is None:
            return []
        return list(self.attempt.leave(member, tell_members=tell_members))

    def proved(self, member: str, base: str) -> None:
        """A member showed that it stands on the committed state."""
        self.roll.proved(member, base)
        self.unproved = False
