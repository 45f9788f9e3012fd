"""The assignment of policies to encoders and heads of a critic's network, and their inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import CheckpointCorrupt, ConfigError
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.value import ValueNet
from atoll.rl.trajectory import Trajectory

JOINT, UNCONDITIONED, OWN = "joint", "unconditioned", "own"


@dataclass(frozen=True, slots=True)
class ValueHead:
    """One policy's place in the network."""

    spec: TaskSpec
    encoder: int
    head: int


class ValueHeads:
    """The policies of one network.

    `kind` is one of `CRITICS`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.by_name: dict[str, ValueHead] = {}
        self._encoders: dict[tuple[str, int], int] = {}

    def __getitem__(self, name: str) -> ValueHead:
        """Return the head of a policy.

        Raises:
            ConfigError: the policy was not added.
        """
        if name not in self.by_name:
            raise ConfigError(
                "the critic does not know a policy", given=repr(name),
                expected="one of " + ", ".join(map(repr, self.by_name)),
                remedy="a member announces its task before it sends experience",
            )  # fmt: skip
        return self.by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    @property
    def specs(self) -> list[TaskSpec]:
        """The tasks, in the order they were added."""
        return [head.spec for head in self.by_name.values()]

    def add(self, spec: TaskSpec, net: ValueNet) -> None:
        """Assign an encoder and a head to a policy.

        Raises:
            ConfigError: a joint critic lacks the joint state of this policy.
        """
        features = self._features(spec)
        key = (spec.env, features)
        if key not in self._encoders:
            self._encoders[key] = net.add_encoder(features)
        single = self.kind == UNCONDITIONED and bool(self.by_name)
        head = 0 if single else net.add_head()
        self.by_name[spec.policy] = ValueHead(spec, self._encoders[key], head)

    def check_same(self, spec: TaskSpec) -> None:
        """Refuse a known policy with other spaces than before.

        Raises:
            ConfigError: the spaces differ.
        """
        known = self.by_name[spec.policy].spec
        if (known.observation, known.state, known.agents) != (
            spec.observation, spec.state, spec.agents,
        ):  # fmt: skip
            raise ConfigError(
                f"policy {spec.policy!r} changed its spaces",
                given=f"observations {spec.observation}, state {spec.state}",
                expected=f"observations {known.observation}, state {known.state}, as before",
                remedy="give a policy with another environment another name",
            )

    def _features(self, spec: TaskSpec) -> int:
        """Return the input width for one value of this policy."""
        if self.kind != JOINT:
            return int(torch.Size(spec.observation).numel())
        if not spec.state:
            raise ConfigError(
                f"a joint critic cannot see the state of policy {spec.policy!r}",
                given=f"an environment without a joint state, observations {spec.observation}",
                expected="an environment of several agents that act at the same time",
                remedy='use critic = "pooled" for environments of one agent',
            )
        first = next(iter(self.specs), spec)
        if (first.state, first.agents) != (spec.state, spec.agents):
            raise ConfigError(
                f"policy {spec.policy!r} does not fit the joint critic",
                given=f"a joint state of shape {spec.state} for {spec.agents} agents",
                expected=f"shape {first.state} for {first.agents} agents, as policy "
                f"{first.policy!r} has",
                remedy='use critic = "pooled", or the same environment for all policies',
            )
        return int(torch.Size(spec.state).numel()) + spec.agents

    def inputs(self, trajectory: Trajectory, head: ValueHead, *, cut: bool) -> Tensor:
        """Return the network's input, [rows, features].

        With `cut` all T + 1 observations, then the truncated ones; otherwise the first T.
        """
        seen, ends = trajectory.observations, trajectory.cut_observations
        if self.kind == JOINT:
            seen, ends = _joint(trajectory, agents=head.spec.agents)
        if not cut:
            return seen[:-1].flatten(0, 1).flatten(1)
        rows = seen.flatten(0, 1).flatten(1)
        return torch.cat([rows, ends.flatten(1)]) if len(ends) else rows

    def place(self, name: str) -> tuple[int, int]:
        """Return a sort key that puts the policies of one encoder side by side."""
        return self.by_name[name].encoder, list(self.by_name).index(name)

    def to_tensor(self) -> Tensor:
        """Return kind and tasks as bytes, uint8."""
        specs = [json.loads(spec.to_json()) for spec in self.specs]
        text = json.dumps({"kind": self.kind, "specs": specs})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def read(self, tensors: Mapping[str, Tensor]) -> list[TaskSpec]:
        """Return the tasks in a critic's snapshot.

        Raises:
            CheckpointCorrupt: it is something else, or of another kind of critic.
        """
        try:
            found = json.loads(bytes(tensors["specs"].tolist()))
            kind, specs = found["kind"], [json.dumps(spec) for spec in found["specs"]]
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointCorrupt(
                "these are not the weights of a critic", given=", ".join(sorted(tensors))[:200],
                expected="a message of the same version",
            ) from error  # fmt: skip
        if kind != self.kind:
            raise CheckpointCorrupt(
                "the critic is of another kind", given=repr(kind), expected=repr(self.kind),
                remedy="all jobs of a pool name the same critic in [rl]",
            )  # fmt: skip
        return [TaskSpec.from_json(spec) for spec in specs]


def _joint(trajectory: Trajectory, *, agents: int) -> tuple[Tensor, Tensor]:
    """Return joint states with the agent as one-hot, [T + 1, B, state + agents] and [K, ...]."""
    states, cut = trajectory.states, trajectory.cut_states
    if states is None:
        raise ConfigError(
            f"a joint critic got experience of {trajectory.policy!r} without joint states",
            expected="states with every trajectory", remedy="its environment has no joint state",
        )  # fmt: skip
    who = torch.eye(agents)[torch.arange(states.shape[1]) % agents].to(states.device)
    seen = torch.cat([states.flatten(2), who.expand(len(states), -1, -1)], 2)
    if cut is None or not len(cut):
        return seen, seen.new_zeros(0, seen.shape[2])
    return seen, torch.cat([cut.flatten(1), who[trajectory.cut_at[:, 1]]], 1)
