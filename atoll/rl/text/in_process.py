"""All policies and the value model of a job in one process, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable

from atoll.config import JobSpec
from atoll.rl.text.critic import TextCritic
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.language_policy import LanguagePolicy
from atoll.rl.text.sharing import Exchange
from atoll.rl.text.start import StartModel
from atoll.rl.text.trained import copied

OnUpdate = Callable[[str, dict[str, float]], None]
"""Called after an update with the policy and its figures."""


class TextInProcessRun:
    """A whole job for language models in this process.

    `beginning` is already trained; it is not changed. Its device computes.
    """

    def __init__(self, spec: JobSpec, beginning: StartModel) -> None:
        rl, seed = spec.rl, spec.job.seed
        self.policies = [
            LanguagePolicy(
                policy.name, beginning.tasks[policy.name], copied(beginning.model),
                beginning.wording, rl, episodes=policy.steps or rl.steps, seed=seed,
            )
            for policy in rl.policies
        ]  # fmt: skip
        tasks = {policy.name: policy.task_word for policy in rl.policies}
        self._exchanges = {
            policy.name: Exchange(policy, task=tasks[policy.name], seed=seed)
            for policy in self.policies if rl.share
        }  # fmt: skip
        names = [policy.name for policy in self.policies]
        self.critics: list[TextCritic] = []
        """One for all, one for each policy (`own`), or none."""
        if rl.has_critic:
            self.critics = [TextCritic(names, beginning.model, rl, seed=seed)]
        elif rl.algorithm != "grpo":
            self.critics = [TextCritic([name], beginning.model, rl, seed=seed) for name in names]

    @property
    def done(self) -> bool:
        """Whether every policy has learned from all its episodes."""
        return all(policy.done for policy in self.policies)

    def update(self, *, on_update: OnUpdate = lambda policy, facts: None) -> None:
        """Let every unfinished policy write and learn once, then the critic."""
        own = [policy.write() for policy in self.policies if not policy.done]
        scores = {episodes.policy: episodes.scores.mean().item() for episodes in own}
        written = self._shared(own)
        for episodes in written:
            policy = next(one for one in self.policies if one.name == episodes.policy)
            critic = next((c for c in self.critics if policy.name in c.policies), None)
            values = None if critic is None else critic.of(episodes)
            facts = policy.improve(episodes, values)
            on_update(policy.name, facts | {"return": scores[policy.name]})
        for critic in self.critics:
            mine = [episodes for episodes in written if episodes.policy in critic.policies]
            if mine:
                critic.learn(mine)

    def _shared(self, written: list[Episodes]) -> list[Episodes]:
        """Return batches with groups of the others, if policies share."""
        exchanges = self._exchanges
        if not exchanges:
            return written
        messages = [exchanges[one.policy].message(one) for one in written]
        for exchange in exchanges.values():
            for message in messages:
                exchange.take(message)
        return [exchanges[one.policy].with_others(one) for one in written]
