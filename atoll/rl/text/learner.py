"""Train a language model on its own completions, with PPO or GRPO.

PPO takes one advantage per token (from values), and has the divergence from the reference in its
rewards. GRPO takes one advantage per completion (from its group), and has the divergence in its
loss. Both use the clipped ratio of each token.

`plain`, `half_square` and `positive` estimate KL(π || π_ref) from tokens drawn from π, by
x = ln π_ref(token) - ln π(token), one number per token. The means of `plain` and `positive` are the
divergence; that of `half_square` is near it while the two policies are close. See
http://joschu.net/blog/kl-approx.html: k1 is `plain`, k2 `half_square`, k3 `positive`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from atoll.config.rl_tables import RlTable
from atoll.devices.choose import device_of_model
from atoll.errors import LossNotFinite
from atoll.rl.algorithms.losses import approximate_divergence, clipped_policy_loss, clipped_share
from atoll.rl.nets.optimizer import (
    adam,
    annealed,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rate,
)
from atoll.rl.state_saver import parts_of, prefixed
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.sampler import TextModel, log_probabilities


def plain(log_ratios: Tensor) -> Tensor:
    """Return -x: unbiased, may be negative."""
    return -log_ratios


def half_square(log_ratios: Tensor) -> Tensor:
    """Return x²/2: never negative, biased, low variance."""
    return 0.5 * log_ratios.square()


def positive(log_ratios: Tensor) -> Tensor:
    """Return exp(x) - 1 - x: unbiased and never negative; its gradient pulls to the reference."""
    return approximate_divergence(log_ratios)


class TokenLearner:
    """Trains a policy.

    Args:
        model: The policy, without dropout; parameters that need no gradient stay.
        rl: `[rl]`: `lr`, `clip`, `epochs`, `minibatches`, `entropy`, `max_norm`, `target_kl`;
            `kl` with `grpo`.
        updates: Number of updates after which the learning rate is zero.
    """

    def __init__(self, model: TextModel, rl: RlTable, *, updates: int) -> None:
        self.version = 0
        """Number of updates."""
        self._model, self._rl, self._updates = model.eval(), rl, max(1, updates)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = adam(self._trained, lr=rl.lr)

    def improve(
        self,
        episodes: Episodes,
        advantages: Tensor,
        reference: Tensor,
        *,
        generator: torch.Generator | None,
    ) -> dict[str, float]:
        """Learn from one batch; return figures.

        Args:
            episodes: Completions of this policy.
            advantages: [B, T].
            reference: [B, T]: log-probabilities under the reference.
            generator: Source of the order of minibatches; None keeps the order.

        Returns:
            `policy_loss`, `entropy`, `kl` (between the policy before and after), `clip_fraction`,
            `passes`: means over all minibatches.

        Raises:
            LossNotFinite: the loss is not finite; the weights are those of the step before.
        """
        rl, device = self._rl, device_of_model(self._model)
        episodes = episodes.to(device)
        advantages, reference = advantages.to(device), reference.to(device)
        rate = annealed(rl.lr, done=self.version, total=self._updates, anneal=rl.anneal)
        set_rate(self._optimizer, rate)
        seen: list[dict[str, float]] = []
        passes = 0
        for _ in range(rl.epochs):
            start = len(seen)
            for part in self._parts(len(episodes.tokens), generator):
                rows = part.to(device)
                seen.append(self._step(episodes, rows, advantages[rows], reference[rows]))
            passes += 1
            divergence = sum(s["kl"] for s in seen[start:]) / (len(seen) - start)
            if rl.target_kl and divergence > rl.target_kl:
                break
        self.version += 1
        means = {name: sum(s[name] for s in seen) / len(seen) for name in seen[0]}
        return means | {"passes": float(passes)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return version and optimizer, flat; the model is saved by its owner."""
        kept = prefixed("optimizer", optimizer_tensors(self._optimizer))
        return kept | {"version": torch.tensor(self.version)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`.

        Raises:
            CheckpointCorrupt: it belongs to another model.
        """
        load_optimizer_tensors(self._optimizer, parts_of(state, "optimizer"))
        self.version = int(state["version"])

    def _parts(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        order = torch.arange(count)
        if generator is not None:
            order = torch.randperm(count, generator=generator)
        return order.tensor_split(min(self._rl.minibatches, count))

    def _step(
        self, episodes: Episodes, rows: Tensor, advantages: Tensor, reference: Tensor
    ) -> dict[str, float]:
        rl, mask = self._rl, episodes.mask[rows]
        now, entropies = log_probabilities(
            self._model, episodes.tokens[rows], episodes.places[rows], episodes.written[rows],
            temperature=rl.temperature,
        )  # fmt: skip
        log_ratios = (now - episodes.log_probabilities[rows]) * mask
        losses = clipped_policy_loss(log_ratios, advantages, clip=rl.clip) - rl.entropy * entropies
        if rl.algorithm == "grpo":
            losses = losses + rl.kl * positive((reference - now) * mask)
        loss = (losses * token_weights(mask, per_completion=rl.algorithm == "grpo")).sum()
        if not torch.isfinite(loss):
            raise LossNotFinite(
                "the loss of a policy is not finite",
                given=f"policy {episodes.policy}, update {self.version + 1}",
                expected="a finite number", remedy="a smaller lr in [rl], or a larger kl",
            )  # fmt: skip
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self._trained, rl.max_norm)
        self._optimizer.step()
        with torch.no_grad():
            changes = log_ratios[mask]
            return {
                "policy_loss": loss.item(),
                "entropy": entropies[mask].mean().item(),
                "kl": approximate_divergence(changes).mean().item(),
                "clip_fraction": clipped_share(changes, clip=rl.clip).item(),
            }


def token_weights(mask: Tensor, *, per_completion: bool) -> Tensor:
    """Return weights that sum to 1 over the written steps, [B, T].

    `per_completion`: every completion weighs the same (GRPO), not every token (PPO).
    """
    ones = mask.to(torch.float32)
    if per_completion:
        return ones / ones.sum(1, keepdim=True) / len(ones)
    return ones / ones.sum()
