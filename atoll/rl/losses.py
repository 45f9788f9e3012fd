"""The losses of policies and values, one number per step: the caller takes the mean.

What is logged about an update (divergence, share of clipped steps, explained variance) is here
too. Tensors may have any shape, the same for all, and any floating dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(log_ratios: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Return PPO's loss of each step, the pessimistic one of the ratio and the clipped ratio.

    Proximal Policy Optimization Algorithms, eq. 7 (https://arxiv.org/abs/1707.06347), negated.

    Args:
        log_ratios: ln π(a|s) now minus when it acted.
        advantages: How much better the action was than expected.
        clip: ε, how far a ratio may go from 1 and still gain.
    """
    ratios = log_ratios.exp()
    return torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - clip, 1 + clip))


def policy_gradient_loss(log_probabilities: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss of each step whose gradient is the policy gradient: -A ln π(a|s)."""
    return -advantages.detach() * log_probabilities


def value_loss(
    values: Tensor, targets: Tensor, *, before: Tensor | None = None, clip: float = 0.0
) -> Tensor:
    """Return half the squared error of each value.

    Args:
        values: What the network says now.
        targets: What it should say.
        before: What it said when the batch was made; needed for `clip`.
        clip: A value that moved by more than this away from `before` gains nothing by it; 0: no
            limit.
    """
    squared = (values - targets).square()
    if clip > 0 and before is not None:
        near = before + (values - before).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - targets).square())
    return 0.5 * squared


def approximate_divergence(log_ratios: Tensor) -> Tensor:
    """Return an unbiased estimate, never negative, of KL(old || new) from each step: r - 1 - ln r.

    `log_ratios` are ln of new over old, of actions that the old policy drew.
    """
    return torch.expm1(log_ratios) - log_ratios


def clipped_share(log_ratios: Tensor, *, clip: float) -> Tensor:
    """Return which share of the ratios is beyond the clip, a scalar."""
    return ((log_ratios.exp() - 1).abs() > clip).to(log_ratios.dtype).mean()


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - Var(targets - values) / Var(targets): 1 is perfect, 0 no better than a constant.

    Targets that are all the same explain nothing: 0.
    """
    spread = targets.var(correction=0)
    rest = (targets - values).var(correction=0)
    return torch.where(spread > 0, 1 - rest / spread.clamp_min(1e-30), torch.zeros_like(spread))


def standardised(advantages: Tensor) -> Tensor:
    """Return advantages of mean 0 and deviation 1 over all of them."""
    deviation = advantages.std(correction=0)
    return (advantages - advantages.mean()) / (deviation + 1e-8)
