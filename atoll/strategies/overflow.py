"""What members do when one of them has gradients that overflowed in half precision.

A gradient scaler finds out on one member only. Where gradients are agreed on in every step, all
members must skip the step or none: the flag travels in the weight of the contribution, so it costs
no bytes and no round of its own. Weights count tokens, which are whole numbers; a fraction means
that somebody's gradients overflowed.
"""

from __future__ import annotations

OVERFLOW_WEIGHT = 2.0**-20
"""Weight of gradients that overflowed, and are zeros now: exact beside 2^32 tokens."""


def told_weight(weight: float, *, overflowed: bool) -> float:
    """Return the weight to contribute with: a whole number, or the sign of an overflow."""
    return OVERFLOW_WEIGHT if overflowed else float(max(1, round(weight)))


def any_overflowed(total: float) -> bool:
    """Return whether the sum of the weights says that some member's gradients overflowed."""
    return total != int(total)
