"""All policies and the value model of a job in one process, in a fixed order."""

from __future__ import annotations

import copy
from collections.abc import Callable

from atoll.config import JobSpec
from atoll.rl.text.critic import TextCritic
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.start import StartModel

Told = Callable[[str, dict[str, float]], None]
"""Called after an update with the policy and its figures."""


class TextInProcessRun:
    """A whole job for language models in this process.

    `beginning` is already trained; it is not changed. Its device computes.
    """

    def __init__(self, spec: JobSpec, beginning: StartModel) -> None:
        rl, seed = spec.rl, spec.job.seed
        self.policies = [
            LanguagePolicy(
                policy.name, beginning.tasks[policy.name], copy.deepcopy(beginning.model),
                beginning.wording, rl, episodes=policy.steps or rl.steps, seed=seed,
            )
            for policy in rl.policies
        ]  # fmt: skip
        names = [policy.name for policy in self.policies]
        self.critics: list[TextCritic] = []
        """One for all, one for each policy (`own`), or none."""
        if rl.has_critic:
            self.critics = [TextCritic(names, beginning.gpt, rl, seed=seed)]
        elif rl.algorithm != "grpo":
            self.critics = [TextCritic([name], beginning.gpt, rl, seed=seed) for name in names]

    @property
    def done(self) -> bool:
        """Whether every policy has learned from all its episodes."""
        return all(policy.done for policy in self.policies)

    def update(self, *, told: Told = lambda policy, facts: None) -> None:
        """Let every unfinished policy write and learn once, then the critic."""
        written = [policy.write() for policy in self.policies if not policy.done]
        for episodes in written:
            policy = next(one for one in self.policies if one.name == episodes.policy)
            critic = next((c for c in self.critics if policy.name in c.policies), None)
            values = None if critic is None else critic.of(episodes)
            facts = policy.improve(episodes, values)
            told(policy.name, facts | {"return": episodes.scores.mean().item()})
        for critic in self.critics:
            mine = [episodes for episodes in written if episodes.policy in critic.policies]
            if mine:
                critic.learn(mine)
