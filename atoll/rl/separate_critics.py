"""A critic for each policy, side by side: what a learner has instead of a pooled one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.rl.critic import Critic
from atoll.rl.seeds import seed_for
from atoll.rl.spaces import TaskSpec
from atoll.rl.state import parts_of, prefixed
from atoll.rl.trajectory import Trajectory
from atoll.rl.values import Valued


class SeparateCritics:
    """Speaks as one critic, but no policy's experience touches another's values."""

    def __init__(self, rl: RlTable, *, seed: int) -> None:
        """Begin with nobody."""
        self._rl, self._seed = rl, seed
        self._critics: dict[str, Critic] = {}
        self.version = 0
        """Updates so far."""

    def add_policy(self, spec: TaskSpec) -> None:
        """Make a critic for a policy; again is no mistake."""
        if spec.policy not in self._critics:
            seed = seed_for(self._seed, "critic", spec.policy)
            self._critics[spec.policy] = Critic(self._rl, seed=seed, kind="own")
        self._critics[spec.policy].add_policy(spec)

    def values_of(self, trajectories: Sequence[Trajectory]) -> list[Valued]:
        """Return the values of several trajectories."""
        return [self._critics[one.policy].of(one) for one in trajectories]

    def learn(
        self, trajectories: Sequence[Trajectory], *, targets: Sequence[Tensor] | None = None
    ) -> dict[str, dict[str, float]]:
        """Let each critic learn from its own; see `Critic.learn`."""
        told: dict[str, dict[str, float]] = {}
        for name, critic in self._critics.items():
            mine = [i for i, one in enumerate(trajectories) if one.policy == name]
            if mine:
                goals = None if targets is None else [targets[i] for i in mine]
                told |= critic.learn([trajectories[i] for i in mine], targets=goals)
        self.version += 1
        return told

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on."""
        state: dict[str, Tensor] = {}
        for number, critic in enumerate(self._critics.values()):
            state |= prefixed(str(number), critic.state_dict())
        return state

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned; the policies MUST be the same, in the same order."""
        for number, critic in enumerate(self._critics.values()):
            critic.load_state_dict(parts_of(tensors, str(number)))
            self.version = max(self.version, critic.version)
