"""The tables of a job file for reinforcement learning: `[rl]` and `[[rl.policies]]`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

from atoll.config.constraints import (
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Share,
    one_of,
)

Critic = Annotated[str, one_of("pooled", "unconditioned", "corrected", "joint", "own", "none")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyTable:
    """`[[rl.policies]]`: one policy, the environment it lives in, and who acts for it."""

    name: str = ""
    """Its name in tables, messages and files, e.g. `light`."""
    env: str = ""
    """A Gymnasium name (`CartPole-v1`), `module:factory`, or `text:TASK`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the environment."""
    task: str = ""
    """Policies with the same word solve the same task; empty: the same env with the same options
    is one."""
    actors: Positive = 1
    """Members that act for it; more than one only with `impala`."""
    steps: int = 0
    """Its environment steps; 0: those of [rl]."""

    @property
    def task_word(self) -> str:
        """The word that policies of the same task share."""
        options = json.dumps(dict(self.options), sort_keys=True, default=str)
        return self.task or (f"{self.env} {options}" if self.options else self.env)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlTable:
    """`[rl]`: how policies learn, and whose values they learn by."""

    algorithm: Annotated[str, one_of("ppo", "impala", "a3c", "grpo")] = "ppo"
    """`ppo`, `impala`, `a3c`, or `grpo` (language models only)."""
    critic: Critic = "pooled"
    """`pooled` (one network for all, told whose value is asked), `unconditioned` (not told),
    `corrected` (same task: V-trace over everybody's experience), `joint` (sees the joint state),
    `own` (each policy its own), `none`."""
    values: Annotated[str, one_of("push", "service")] = "push"
    """How values come down: `push` (weights, every `push_every` updates) or `service` (asked)."""
    steps: Positive = 100_000
    """Environment steps of each policy (of a language model: episodes)."""
    environments: Positive = 8
    """Copies of the environment side by side in each actor."""
    rollout: Positive = 64
    """Steps of each copy between two updates."""
    epochs: Positive = 10
    """Passes over a rollout per update of a policy."""
    minibatches: Positive = 4
    """Parts of a rollout per pass."""
    gamma: Share = 0.99
    """Discount per step."""
    gae_lambda: Share = 0.95
    """Lambda of generalised advantage estimation."""
    clip: PositiveFloat = 0.2
    """Largest change of a ratio of probabilities in PPO."""
    entropy: NotNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    lr: PositiveFloat = 3e-4
    """Learning rate of policies."""
    anneal: bool = True
    """Whether that rate falls to zero over the run."""
    max_norm: PositiveFloat = 0.5
    """Largest gradient norm."""
    target_kl: NotNegativeFloat = 0.0
    """Passes over a rollout end early beyond this divergence; 0: never."""
    hidden: list[int] = dataclasses.field(default_factory=lambda: [64, 64])
    """Widths of a policy's hidden layers."""
    recurrent: NotNegative = 0
    """Width of a recurrent cell in every policy; 0: none."""
    normalise: bool = True
    """Whether observations are normalised by their running mean and deviation."""
    critic_lr: PositiveFloat = 1e-3
    """Learning rate of the critic."""
    critic_hidden: list[int] = dataclasses.field(default_factory=lambda: [64, 64])
    """Widths of its trunk."""
    critic_epochs: Positive = 10
    """Passes over a batch of trajectories per update of the critic."""
    critic_minibatches: Positive = 4
    """Parts of the batch per pass."""
    rho_clip: PositiveFloat = 1.0
    """Largest importance weight of V-trace's temporal differences."""
    c_clip: PositiveFloat = 1.0
    """Largest trace coefficient of V-trace; at most `rho_clip`."""
    push_every: Positive = 1
    """Updates of the critic between two publications of its weights."""
    staleness: NotNegative = 20
    """Policy versions that a trajectory may be old; older ones are dropped and counted."""
    queue_items: Positive = 8
    """Trajectories of one actor that may wait for the critic; then the actor waits."""
    save_every: Positive = 20
    """Updates between two saved states of each member."""
    pool: str = ""
    """Name of a critic that several jobs share, with a slash, e.g. `pool/balance`; empty: this
    job's own."""
    host_critic: bool = True
    """Whether the critic is a member of this job; False: it lives in another job of the pool."""
    record: bool = True
    """Whether an episode of each policy is recorded as a GIF at the end."""
    kl: NotNegativeFloat = 0.05
    """Language models: weight of the divergence from the reference model."""
    group: Positive = 8
    """Language models, `grpo`: completions per prompt that are compared."""
    max_tokens: Positive = 32
    """Language models: longest completion."""
    temperature: PositiveFloat = 1.0
    """Language models: of sampling."""
    start: str = ""
    """Language models: weights to start from; empty: they are trained first."""
    policies: list[PolicyTable] = dataclasses.field(default_factory=list)
    """One `[[rl.policies]]` for each."""

    @property
    def active(self) -> bool:
        """Whether the job is one of reinforcement learning at all."""
        return bool(self.policies or self.pool)

    @property
    def has_critic(self) -> bool:
        """Whether one member of this job is the critic, or the learner of everything."""
        return self.host_critic and (
            self.algorithm == "impala"
            or (self.algorithm != "grpo" and self.critic not in ("own", "none"))
        )

    @property
    def has_code(self) -> bool:
        """Whether an environment is some other package's function, named `module:factory`."""
        envs = [policy.env for policy in self.policies]
        return any(":" in env and not env.startswith(("text:", "atoll.")) for env in envs)

    @property
    def members(self) -> int:
        """How many members the job has: actors, and the critic if it is one of them."""
        return sum(policy.actors for policy in self.policies) + int(self.has_critic)
