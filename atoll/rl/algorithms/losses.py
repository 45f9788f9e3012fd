"""Losses of policies and values per step, and advantages: GAE, n-step returns and V-trace.

Losses and figures of an update take tensors of one shape and any floating dtype; the caller
averages.

Advantages go backward in time over each column of `ValuedSteps`; `gamma` and `lam` may be tensors
that broadcast, e.g. [B]: one number for each column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.rl.trajectory import ValuedSteps


def clipped_policy_loss(log_ratios: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Return PPO's loss of each step, the larger of those by the ratio and the clipped ratio.

    Proximal Policy Optimization Algorithms, eq. 7 (https://arxiv.org/abs/1707.06347), negated.

    Args:
        log_ratios: ln π(a|s) now minus when it acted.
        advantages: How much better the action was than expected.
        clip: ε, how far a ratio may move from 1 and still gain.
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
        values: Current output of the network.
        targets: What it should be.
        before: Output when the batch was made; needed for `clip`.
        clip: A value that moves further than this from `before` gains nothing; 0: no limit.
    """
    squared = (values - targets).square()
    if clip > 0 and before is not None:
        near = before + (values - before).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - targets).square())
    return 0.5 * squared


def approximate_divergence(log_ratios: Tensor) -> Tensor:
    """Return r - 1 - ln r per step: an unbiased estimate of KL(old || new), never negative.

    `log_ratios` are ln of new over old, of actions drawn from the old policy.
    """
    return torch.expm1(log_ratios) - log_ratios


def clipped_share(log_ratios: Tensor, *, clip: float) -> Tensor:
    """Return the fraction of ratios beyond the clip, a scalar."""
    return ((log_ratios.exp() - 1).abs() > clip).to(log_ratios.dtype).mean()


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - Var(targets - values) / Var(targets); 0 for constant targets.

    1 is perfect, 0 no better than a constant.
    """
    spread = targets.var(correction=0)
    rest = (targets - values).var(correction=0)
    return torch.where(spread > 0, 1 - rest / spread.clamp_min(1e-30), torch.zeros_like(spread))


def standardised(advantages: Tensor) -> Tensor:
    """Return advantages with mean 0 and deviation 1."""
    deviation = advantages.std(correction=0)
    return (advantages - advantages.mean()) / (deviation + 1e-8)


def gae(steps: ValuedSteps, *, gamma: float | Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and targets of the value, each [T, B].

    High-Dimensional Continuous Control Using Generalized Advantage Estimation, eq. 16
    (https://arxiv.org/abs/1506.02438): δ_t = r_t + γ V(s_{t+1}) - V(s_t), A_t = δ_t + γλ A_{t+1};
    the target is A_t + V(s_t).
    """
    errors = steps.rewards + gamma * steps.next_values * (~steps.terminated) - steps.values
    advantages = backward_sum(errors, (gamma * lam) * (~steps.ended).to(errors.dtype))
    return advantages, advantages + steps.values


def n_step(steps: ValuedSteps, *, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and n-step returns: rewards to the end of the stretch, then the value.

    Asynchronous Methods for Deep Reinforcement Learning, algorithm S3
    (https://arxiv.org/abs/1602.01783): R_t = r_t + γ R_{t+1}, bootstrapped at the end; GAE with
    λ = 1.
    """
    return gae(steps, gamma=gamma, lam=1.0)


def vtrace(
    log_ratios: Tensor,
    steps: ValuedSteps,
    *,
    gamma: float | Tensor,
    lam: float | Tensor = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return targets v_s of the value and advantages of the policy, each [T, B].

    IMPALA, eq. 1 and section 4.2 (https://arxiv.org/abs/1802.01561), in its backward form:
    v_s = V_s + ρ_s δ_s + γ c_s (v_{s+1} - V_{s+1}); the policy's advantage is
    ρ_s (r_s + γ v_{s+1} - V_s).

    Differs from the paper:
      * c_s has the factor λ of its remark 2, and truncated episodes bootstrap.

    Args:
        log_ratios: ln π(a|s) - ln μ(a|s) of the learner's and of the acting policy.
        steps: Rewards, and the values of the learner's policy.
        gamma: Discount per step.
        lam: λ of the traces.
        rho_clip: ρ̄, the largest weight of a temporal difference: it decides what is learned.
        c_clip: c̄, the largest trace: it decides only how fast; MUST be at most `rho_clip`.
    """
    ratios = log_ratios.exp()
    rho, trace = ratios.clamp(max=rho_clip), lam * ratios.clamp(max=c_clip)
    values = steps.values
    discount = gamma * (~steps.terminated).to(values.dtype)
    errors = rho * (steps.rewards + discount * steps.next_values - values)
    goes_on = (~steps.ended).to(values.dtype)
    corrections = backward_sum(errors, gamma * trace * goes_on)  # v_s - V_s
    following = torch.zeros_like(corrections)
    following[:-1] = corrections[1:]
    next_targets = steps.next_values + goes_on * following
    return values + corrections, rho * (steps.rewards + discount * next_targets - values)


def backward_sum(terms: Tensor, factors: Tensor) -> Tensor:
    """Return x with x_t = terms_t + factors_t · x_{t+1}, and nothing after the last; [T, B]."""
    found: list[Tensor] = []
    last = torch.zeros_like(terms[0])
    for term, factor in zip(reversed(terms.unbind(0)), reversed(factors.unbind(0)), strict=True):
        last = torch.addcmul(term, factor, last)
        found.append(last)
    found.reverse()
    return torch.stack(found)
