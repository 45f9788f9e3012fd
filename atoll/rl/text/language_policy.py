"""One language policy and its task: it writes completions, is rewarded, and learns. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.devices.choose import device_of_model
from atoll.errors import ConfigError
from atoll.models.causal_lm import CausalLM
from atoll.rl import seeds
from atoll.rl.algorithms.losses import explained_variance, standardised
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.text import rewards
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.learner import TokenLearner
from atoll.rl.text.prompts import Wording
from atoll.rl.text.sampler import TextModel, log_probabilities, write
from atoll.rl.text.tasks import TextTask
from atoll.rl.text.trained import copied, load_trained, trained_tensors


class LanguagePolicy:
    """A policy, the reference it started from, and its task.

    A batch has `environments` times `group` completions: of as many prompts with PPO, or `group` of
    each prompt with GRPO. Both cost the same. With `share`, so many groups are written by others
    (`sharing.py`).

    Args:
        name: The policy's name.
        task: The task that rewards it.
        model: The initial weights, trained in place; a copy is the reference.
        wording: The model's tokens.
        rl: `[rl]`.
        episodes: Completions after which the learning rate is zero.
        seed: Seed of prompts, completions and minibatches.

    Raises:
        ConfigError: a prompt does not fit into the model's context beside `max_tokens`.
    """

    def __init__(
        self,
        name: str,
        task: TextTask,
        model: TextModel,
        wording: Wording,
        rl: RlTable,
        *,
        episodes: int,
        seed: int,
    ) -> None:
        self.name, self.model, self.rl = name, model.eval(), rl
        self.reference = copied(model).requires_grad_(False).eval()
        self.updates = max(1, -(-episodes // (rl.environments * rl.group)))
        """How many there will be in all."""
        self.learner = TokenLearner(model, rl, updates=self.updates)
        self.written = 0
        """Batches so far."""
        self._published = isinstance(model, CausalLM)
        self.task, self.wording, self._seed = task, wording, seed
        self.room = model.config.context - rl.max_tokens
        """Most tokens of a prompt."""
        if self.room < 1:
            raise ConfigError(
                "there is no room for prompts", expected="a context above max_tokens",
                given=f"context = {model.config.context}, max_tokens = {rl.max_tokens}",
            )  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether it has learned from all its episodes."""
        return self.learner.version >= self.updates

    def write(self, *, writer: str = "", number: int = 0) -> Episodes:
        """Return the next batch, with rewards; a batch depends only on its number in the run.

        Args:
            writer: A rollout worker; then a batch depends on the version of the weights, too.
            number: Its number among the batches of this worker and version, from 1.

        Raises:
            ConfigError: a prompt does not fit.
            DataError: a reward is not finite.
        """
        rl, version = self.rl, self.learner.version
        if not writer:
            self.written += 1  # counted first, so that a batch with a bad reward is not repeated
            number = self.written
        which = (writer, version, number) if writer else (number,)
        compared = rl.algorithm == "grpo"
        prompts = self.wording.draw(
            self.task,
            rl.environments - rl.share if compared else rl.environments * rl.group,
            repeats=rl.group if compared else 1, room=self.room,
            source=seeds.source("prompts", self._seed, self.name, *which),
        )  # fmt: skip
        written = write(
            self.model, prompts, ends=self.wording.ends, max_tokens=rl.max_tokens,
            temperature=rl.temperature,
            generator=seeds.generator("writing", self._seed, self.name, *which),
        )  # fmt: skip
        scores = rewards.scores(self.task, prompts, written, self.wording)
        episodes = Episodes(
            policy=self.name, tokens=written.tokens, prompts=prompts.lengths,
            lengths=written.lengths, log_probabilities=written.log_probabilities,
            rewards=torch.zeros_like(written.log_probabilities), scores=scores,
            sequence=number, policy_version=version,
        )  # fmt: skip
        # Without a penalty in the rewards the reference is not evaluated.
        reference = written.log_probabilities if compared else self.referred(episodes)
        episodes.rewards = rewards.rewards_per_step(
            scores, written.lengths, written.log_probabilities, reference,
            kl=0.0 if compared else rl.kl,
        )  # fmt: skip
        return episodes.check()

    def improve(self, episodes: Episodes, values: Tensor | None) -> dict[str, float]:
        """Learn from a batch; return figures.

        `values` are those before each step, [B, T]; None with GRPO.

        Returns:
            The figures of `TokenLearner.improve`; `kl_reference` (nats per completion), `length`
            (mean tokens), and with values `explained_variance`.
        """
        mask, rl = episodes.mask, self.rl
        stats: dict[str, float] = {}
        if values is None:
            each = rewards.group_advantages(episodes.scores, group=rl.group)
            advantages = each[:, None] * mask
        else:
            advantages, targets = rewards.token_advantages(
                episodes, values, gamma=rl.gamma, lam=rl.gae_lambda
            )
            stats["explained_variance"] = explained_variance(values[mask], targets[mask]).item()
            advantages = torch.zeros_like(advantages).masked_scatter(
                mask, standardised(advantages[mask])
            )
        reference = self.referred(episodes)
        apart = ((episodes.log_probabilities - reference) * mask).sum(1)
        stats["kl_reference"] = apart.mean().item()
        stats["length"] = episodes.lengths.double().mean().item()
        order = seeds.generator("order", self._seed, self.name, self.learner.version)
        return stats | self.learner.improve(episodes, advantages, reference, generator=order)

    def referred(self, episodes: Episodes) -> Tensor:
        """Return the reference's log-probabilities of the written tokens, [B, T]."""
        return self._under(self.reference, episodes)

    def current(self, episodes: Episodes) -> Tensor:
        """Return the policy's own log-probabilities of the written tokens as it is now, [B, T]."""
        return self._under(self.model, episodes)

    @torch.no_grad()
    def _under(self, model: TextModel, episodes: Episodes) -> Tensor:
        """Return log-probabilities under a model, where the episodes are."""
        there = episodes.to(device_of_model(model))
        found, _ = log_probabilities(
            model, there.tokens, there.places, there.written, temperature=self.rl.temperature
        )
        return found.to(episodes.tokens.device)

    def examine(self, count: int, *, temperature: float = 0.0) -> tuple[float, list[str]]:
        """Return the mean score on held-out prompts, and some completions."""
        prompts = self.wording.draw(
            self.task, count, repeats=1, room=self.room,
            source=seeds.source("examination", self._seed, self.name),
        )  # fmt: skip
        written = write(
            self.model, prompts, ends=self.wording.ends, max_tokens=self.rl.max_tokens,
            temperature=temperature, generator=seeds.generator("examination", self._seed),
        )  # fmt: skip
        scores = rewards.scores(self.task, prompts, written, self.wording)
        texts = [
            prompt + " " + (self.wording.read(row[start : start + length]) or "(no end)")
            for prompt, row, start, length in zip(
                prompts.texts, written.tokens, prompts.lengths.tolist(), written.lengths.tolist(),
                strict=True,
            )
        ]  # fmt: skip
        return scores.mean().item(), texts

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that an exact resume requires, flat."""
        return {
            **prefixed("model", trained_tensors(self.model)),
            # A published base is loaded again, and the adapters' start is drawn from the seed.
            **({} if self._published else prefixed("reference", self.reference.state_dict())),
            **prefixed("learner", self.learner.state_dict()),
            "written": torch.tensor(self.written),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`.

        Raises:
            CheckpointCorrupt: it belongs to another model.
        """
        load_trained(self.model, parts_of(state, "model"), what=f"policy {self.name}")
        if not self._published:
            referred = parts_of(state, "reference")
            load_module(self.reference, referred, what=f"policy {self.name}")
        self.learner.load_state_dict(parts_of(state, "learner"))
        self.written = int(state["written"])
