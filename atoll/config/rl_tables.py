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

OUR_OWN = tuple(f"atoll.rl.environments.physics:{name}" for name in ("cartpole", "pendulum"))
"""Environments that come with Atoll. No other function of it is one: some write files, and options
are their arguments."""

Critic = Annotated[str, one_of("pooled", "unconditioned", "corrected", "joint", "own", "none")]


def names_code(env: str) -> bool:
    """Return whether `env` names a function that runs with the job's options, but for our own."""
    return ":" in env.removeprefix("text:") and env not in OUR_OWN


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyTable:
    """`[[rl.policies]]`: one policy, its environment and its actors."""

    name: str = ""
    """Name in tables, messages and files, e.g. `light`."""
    env: str = ""
    """A Gymnasium name (`CartPole-v1`), `module:factory`, or `text:TASK`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the environment."""
    task: str = ""
    """Policies with the same word solve the same task; empty: defined by env and options."""
    actors: Positive = 1
    """Its actors; more than one only with `impala`."""
    samplers: NotNegative = 0
    """Further members that only write its completions (language models); 0: its trainer
    writes them itself.
    """
    steps: int = 0
    """Its environment steps; 0: as in [rl]."""

    @property
    def task_word(self) -> str:
        """The identifier of its task."""
        options = json.dumps(dict(self.options), sort_keys=True, default=str)
        return self.task or (f"{self.env} {options}" if self.options else self.env)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlTable:
    """`[rl]`: the algorithm, the critic, and the policies."""

    algorithm: Annotated[str, one_of("ppo", "impala", "a3c", "grpo")] = "ppo"
    """`ppo`, `impala`, `a3c`, or `grpo` (language models only)."""
    critic: Critic = "pooled"
    """`pooled` (one network for all, conditioned on the policy), `unconditioned` (not conditioned),
    `corrected` (same task: V-trace over all experience), `joint` (sees the joint state), `own` (one
    per policy), `none`.
    """
    values: Annotated[str, one_of("push", "service")] = "push"
    """How actors get values: `push` (weights, every `push_every` updates) or `service` (requests).
    """
    steps: Positive = 100_000
    """Environment steps of each policy (of a language model: episodes)."""
    environments: Positive = 8
    """Parallel environments per actor."""
    rollout: Positive = 64
    """Steps of each environment between two updates."""
    epochs: Positive = 10
    """Passes over a rollout per update of a policy."""
    minibatches: Positive = 4
    """Minibatches of a rollout per pass."""
    gamma: Share = 0.99
    """Discount per step."""
    gae_lambda: Share = 0.95
    """Lambda of generalized advantage estimation."""
    clip: PositiveFloat = 0.2
    """Clipping range of PPO's probability ratio."""
    entropy: NotNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    lr: PositiveFloat = 3e-4
    """Learning rate of policies."""
    anneal: bool = True
    """Whether `lr` decays to zero over the run."""
    max_norm: PositiveFloat = 0.5
    """Maximum gradient norm."""
    target_kl: NotNegativeFloat = 0.0
    """Stop passes over a rollout beyond this divergence; 0: never."""
    hidden: list[int] = dataclasses.field(default_factory=lambda: [64, 64])
    """Widths of a policy's hidden layers."""
    recurrent: NotNegative = 0
    """Width of a recurrent cell in every policy; 0: none."""
    normalise: bool = True
    """Normalize observations by running mean and deviation."""
    critic_lr: PositiveFloat = 1e-3
    """Learning rate of the critic."""
    critic_hidden: list[int] = dataclasses.field(default_factory=lambda: [64, 64])
    """Widths of its hidden layers."""
    critic_epochs: Positive = 10
    """Passes over a batch of trajectories per update of the critic."""
    critic_minibatches: Positive = 4
    """Minibatches of the batch per pass."""
    rho_clip: PositiveFloat = 1.0
    """Maximum importance weight of V-trace's temporal differences."""
    c_clip: PositiveFloat = 1.0
    """Maximum trace coefficient of V-trace; at most `rho_clip`."""
    push_every: Positive = 1
    """Updates of the critic between two publications of its weights."""
    staleness: NotNegative = 20
    """Maximum age of a trajectory in policy versions; older ones are dropped and counted."""
    queue_items: Positive = 8
    """Trajectories of one actor waiting for the critic before the actor blocks."""
    save_every: Positive = 20
    """Updates between two saved states of a member."""
    pool: str = ""
    """Name of a critic shared by several jobs, with a slash, e.g. `pool/balance`; empty: not
    shared.
    """
    host_critic: bool = True
    """False: the critic of the pool runs in another job."""
    record: bool = True
    """Record an episode of each policy as a GIF at the end."""
    kl: NotNegativeFloat = 0.05
    """Language models: weight of the divergence from the reference model."""
    group: Positive = 8
    """Language models, `grpo`: completions compared per prompt."""
    share: NotNegative = 0
    """Language models, `grpo`: prompts of each batch whose completions other policies of this job
    with the same task wrote, of `environments`; they travel as text.
    """
    max_tokens: Positive = 32
    """Language models: maximum completion length."""
    temperature: PositiveFloat = 1.0
    """Language models: sampling temperature."""
    start: str = ""
    """Language models: initial weights; empty: pretrain first."""
    policies: list[PolicyTable] = dataclasses.field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether this is an RL job."""
        return bool(self.policies or self.pool)

    @property
    def has_critic(self) -> bool:
        """Whether one member of this job is the critic or the learner."""
        return self.host_critic and (
            self.algorithm == "impala"
            or (self.algorithm != "grpo" and self.critic not in ("own", "none"))
        )

    @property
    def has_code(self) -> bool:
        """Whether an environment or a task is a function, `module:factory`, but for our own."""
        return any(names_code(policy.env) for policy in self.policies)

    @property
    def members(self) -> int:
        """Number of members: actors and samplers, plus the critic if it is in this job."""
        each = sum(policy.actors + policy.samplers for policy in self.policies)
        return each + int(self.has_critic)
