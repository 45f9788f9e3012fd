"""Steps of a round without sockets: all join, all vote, what came of it."""

from __future__ import annotations

from atoll.rounds.effects import Decided, Effect, Planned
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote, Verdict


def rounds_of(count: int, *, preference: str = "relay") -> RoundMachine:
    machine = RoundMachine("j", nodes_wanted=count, preference=preference, reducer_ready=True)
    for slot in range(count):
        machine.expect(f"w{slot}")
        machine.register(f"w{slot}", dial=[f"10.0.0.{slot}:1"])
    return machine


def plan_in(effects: list[Effect]) -> RoundPlan:
    return next(e.plan for e in effects if isinstance(e, Planned))


def verdict_in(effects: list[Effect]) -> Verdict:
    return next(e.verdict for e in effects if isinstance(e, Decided))


def join_all(machine: RoundMachine, members: list[str], now: float, base: str = "b") -> RoundPlan:
    effects: list[Effect] = []
    for member in members:
        effects = machine.join(member, RoundJoin(machine.committed_round, base), now)
    return plan_in(effects)


def vote(plan: RoundPlan, digest: str = "d", *, ok: bool = True) -> RoundVote:
    reason, members = "" if ok else "why", list(plan.members)
    return RoundVote(plan.round, plan.epoch, ok, digest, members, reason, nbytes=10**6)


def commit_all(machine: RoundMachine, plan: RoundPlan, now: float) -> Verdict:
    effects: list[Effect] = []
    for member in plan.members:
        effects = machine.vote(member, vote(plan), now)
    return verdict_in(effects)
