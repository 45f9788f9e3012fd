"""Rewards of completions, and their advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.rl.algorithms.losses import gae
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.prompts import Prompts, Wording
from atoll.rl.text.sampler import Written
from atoll.rl.text.tasks import TextTask
from atoll.rl.trajectory import ValuedSteps


def scores(task: TextTask, prompts: Prompts, written: Written, wording: Wording) -> Tensor:
    """Return the task's reward of each completion, [B]; 0 for one without an end.

    Raises:
        DataError: a reward is not finite.
    """
    found: list[float] = []
    for row, start, length, prompt in zip(
        written.tokens, prompts.lengths.tolist(), written.lengths.tolist(), prompts.texts,
        strict=True,
    ):  # fmt: skip
        text = wording.read(row[start : start + length])
        found.append(0.0 if text is None else float(task.reward(prompt, text)))
        if not -1e30 < found[-1] < 1e30:
            raise DataError(
                "a task's reward is not a finite number",
                given=f"{found[-1]} for {prompt + (text or '')!r}",
                expected="a finite number",
                remedy="look at the task's reward",
            )
    return torch.tensor(found)


def rewards_per_step(
    scores: Tensor,
    lengths: Tensor,
    log_probabilities: Tensor,
    reference: Tensor,
    *,
    kl: float,
) -> Tensor:
    """Return the rewards of each step, [B, T]: a penalty everywhere, the score at the end.

    The penalty of a step is `kl` times ln π(token) - ln π_ref(token); its sum over a completion of
    the policy has the mean `kl` times KL(π || π_ref).

    Args:
        scores: [B], the task's rewards.
        lengths: [B], steps of each completion.
        log_probabilities: [B, T], under the policy that wrote.
        reference: [B, T], under the reference.
        kl: Weight of the penalty.
    """
    steps = torch.arange(log_probabilities.shape[1])
    mask = steps < lengths[:, None]
    rewards = -kl * (log_probabilities - reference) * mask
    return rewards + scores[:, None] * (steps == lengths[:, None] - 1)


def token_advantages(
    episodes: Episodes, values: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages and targets of the value, each [B, T]; zeros after the end.

    `values` [B, T] are those before each step; nothing follows a completion's last token.
    """
    mask = episodes.mask
    values = values * mask
    following = torch.zeros_like(values)
    following[:, :-1] = values[:, 1:]
    last = torch.arange(values.shape[1]) >= episodes.lengths[:, None] - 1
    steps = ValuedSteps(episodes.rewards.T, values.T, following.T, last.T, last.T)
    advantages, targets = gae(steps, gamma=gamma, lam=lam)
    return advantages.T * mask, targets.T * mask


def group_advantages(scores: Tensor, *, group: int) -> Tensor:
    """Return each completion's advantage over the others of its prompt, [B].

    DeepSeekMath, section 4.1.2 (https://arxiv.org/abs/2402.03300): the score minus the group's
    mean, over the group's deviation. A group of equal scores gives zeros: nothing is learned.

    Args:
        scores: [B]; each `group` neighbours have the same prompt.
        group: Completions per prompt, 2 or more.

    Raises:
        ConfigError: the completions do not divide into groups of two or more.
    """
    if group < 2 or len(scores) % group:
        raise ConfigError(
            "completions cannot be compared within groups",
            given=f"{len(scores)} completions in groups of {group}",
            expected="whole groups of 2 or more",
        )
    grouped = scores.view(-1, group)
    apart = grouped - grouped.mean(1, keepdim=True)
    deviation = apart.square().mean(1, keepdim=True).sqrt()
    equal = (grouped == grouped[:, :1]).all(1, keepdim=True)
    return torch.where(equal, torch.zeros_like(apart), apart / deviation.clamp_min(1e-6)).flatten()
