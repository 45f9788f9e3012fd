"""Roles of members in an RL job: slot 0 is the critic, then the actors, then the samplers."""

from __future__ import annotations

import dataclasses

from atoll.config.rl_tables import RlTable

CRITIC, LEARNER, ACTOR, SAMPLER = "critic", "learner", "actor", "sampler"
CRITICS = (CRITIC, LEARNER)
"""Roles of the one member that serves all actors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberRole:
    """The role of one member; its index in the list of roles is its slot."""

    role: str
    """`critic`, `learner` (all policies and the critic, with `impala`), `actor`, or `sampler`
    (writes completions for an actor).
    """
    policy: str = ""
    """Policy of an actor or sampler."""
    env: str = ""
    """Environment of that policy."""
    steps: int = 0
    """Environment steps of that policy over all its actors."""


def member_roles(rl: RlTable) -> list[MemberRole]:
    """Return the roles of a job's members in slot order."""
    first = []
    if rl.has_critic:
        first = [MemberRole(role=LEARNER if rl.algorithm == "impala" else CRITIC)]
    actors = [
        MemberRole(role=ACTOR, policy=policy.name, env=policy.env, steps=policy.steps or rl.steps)
        for policy in rl.policies
        for _ in range(policy.actors)
    ]
    samplers = [
        MemberRole(role=SAMPLER, policy=policy.name, env=policy.env, steps=policy.steps or rl.steps)
        for policy in rl.policies
        for _ in range(policy.samplers)
    ]
    return first + actors + samplers
