"""Estimates of KL(π || π_ref) from tokens that π wrote.

All take x = ln π_ref(token) - ln π(token) of tokens drawn from π and return one number per token.
Their means: `plain` and `positive` the divergence itself, `half_square` nearly so while the two are
close. See http://joschu.net/blog/kl-approx.html, which names them k1, k3 and k2.
"""

from __future__ import annotations

from torch import Tensor

from atoll.rl.losses import approximate_divergence


def plain(log_ratios: Tensor) -> Tensor:
    """Return -x: unbiased, may be negative."""
    return -log_ratios


def half_square(log_ratios: Tensor) -> Tensor:
    """Return x²/2: never negative, biased, little noise."""
    return 0.5 * log_ratios.square()


def positive(log_ratios: Tensor) -> Tensor:
    """Return exp(x) - 1 - x: unbiased and never negative; its gradient pulls to the reference."""
    return approximate_divergence(log_ratios)
