"""Trajectories for rules: facts as a function of time, played through the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.hub.alarms.engine import Alarm, Engine, Rule
from atoll.hub.alarms.facts import Facts, JobFacts, MemberFacts, NodeFacts
from atoll.hub.alarms.series import LossCurve
from atoll.hub.alarms.watch import RULES
from atoll.hub.rounds.timeline import CatchUp, Row
from atoll.wire.states import RoundMemberState

LOOK_S = 2.0
START = 1_000_000.0


def rule(kind: str) -> Rule:
    return next(rule for rule in RULES if rule.kind == kind)


@dataclass
class Played:
    """What became of alarms in a trajectory."""

    opened: list[Alarm] = field(default_factory=list)
    ended: list[Alarm] = field(default_factory=list)

    def only(self) -> Alarm:
        """Return the one alarm that opened."""
        assert len(self.opened) == 1, [a.finding for a in self.opened]
        return self.opened[0]


def play(kind: str, facts_at: Callable[[float], Facts], *, seconds: float) -> Played:
    """Look every two seconds from START on, as the hub does."""
    chosen = rule(kind)
    engine, played, now = Engine(RULES), Played(), START
    while now <= START + seconds:
        changes = engine.look(chosen.find(facts_at(now)), {kind}, now)
        played.opened += changes.opened
        played.ended += changes.ended
        now += LOOK_S
    return played


def row(member: str, **changes: Any) -> Row:
    """Return an ordinary part of a round."""
    ordinary: dict[str, Any] = {
        "node": f"lap{member[1:]}", "compute_s": 8.0, "wait_s": 0.5, "send_s": 1.0, "vote_s": 0.1,
        "apply_s": 0.1, "update_norm": 1.0, "loss": 2.0, "tokens": 4_000, "steps": 10,
    }  # fmt: skip
    return Row(member=member, **(ordinary | changes))


def passed(
    number: int,
    rows: Sequence[Row],
    *,
    time: float = START,
    contributors: Sequence[str] | None = None,
) -> CatchUp:
    """Return a committed round."""
    members = [one.member for one in rows]
    given = members if contributors is None else list(contributors)
    return CatchUp(number + 1, number, "relay", members, given, time, 2.0, 1_000_000, list(rows))


def job(
    rounds: Sequence[CatchUp] = (),
    *,
    members: Sequence[str] | dict[str, MemberFacts] = ("w0", "w1", "w2"),
    states: dict[str, str] | None = None,
    **changes: Any,
) -> JobFacts:
    """Return a job that runs."""
    known = members if isinstance(members, dict) else {
        m: MemberFacts(
            member=m, node=f"lap{m[1:]}", state=(states or {}).get(m, "running"),
            round_state=RoundMemberState.LIVE, since=START - 10_000,
        )
        for m in members
    }  # fmt: skip
    fields = {"job": "j1", "state": "running", "members": known, "rounds": rounds}
    return JobFacts(**(fields | changes))


def facts(*jobs: JobFacts, now: float = START, nodes: Sequence[NodeFacts] = ()) -> Facts:
    return Facts(now=now, jobs=jobs, nodes=nodes)


def curve(losses: Sequence[float], *, every_s: float = 20.0) -> list[tuple[float, float]]:
    """Return losses as the hub keeps them."""
    made = LossCurve()
    for number, loss in enumerate(losses):
        made.add(START + number * every_s, loss)
    return made.points


def learning(rounds: int, *, noise: float, seed: int, floor: float = 1.5) -> list[float]:
    """Return a loss that falls as a power law does, with noise of a share of it."""
    words = random.Random(seed)
    clean = [floor + 3.0 * (1 + 0.15 * n) ** -0.5 for n in range(rounds)]
    return [loss * (1 + words.gauss(0.0, noise)) for loss in clean]
