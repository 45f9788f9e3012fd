"""Who does what in a job of reinforcement learning: slot 0 is the critic, then come the actors."""

from __future__ import annotations

import dataclasses

from atoll.config.rl_tables import RlTable

CRITIC, LEARNER, ACTOR = "critic", "learner", "actor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """What one member does; its place in the list of seats is its slot."""

    role: str
    """`critic`, `learner` (of all policies and the critic, with `impala`) or `actor`."""
    policy: str = ""
    """Whose actor it is."""
    env: str = ""
    """Where that policy lives."""
    steps: int = 0
    """Environment steps of that policy, all its actors together."""


def seats(rl: RlTable) -> list[Seat]:
    """Return what the members of a job do, in the order of slots."""
    first = []
    if rl.has_critic:
        first = [Seat(role=LEARNER if rl.algorithm == "impala" else CRITIC)]
    actors = [
        Seat(role=ACTOR, policy=policy.name, env=policy.env, steps=policy.steps or rl.steps)
        for policy in rl.policies
        for _ in range(policy.actors)
    ]
    return first + actors
