"""Which contributions look odd, and what a contribution is worth.

Two kinds of figures, after Gauntlet of Templar (https://arxiv.org/abs/2505.21684):

 * Looks: size, direction and likeness of every contribution of every round, which the reducer
   takes of a sample of the elements. What looks odd is computed again, as far as the budget lasts.
 * Gains: the relative improvement of the loss that a contribution gives alone, on the member's own
   data and on held-out data. A checker measures them, because it has model, data and contribution
   at hand. An honest contribution gains more on its own data, because it was trained on them.

Differs from the paper:
  * a score decides who is computed again, or is shown; it never convicts, and weighs nothing;
  * what is compared is relative to the other members of the round, so no threshold depends on the
    model or on the learning rate.

Legend: L the mean loss, theta the committed parameters, Delta a pseudo-gradient.
    gain = (L(theta) - L(theta - Delta)) / L(theta)
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from atoll.wire.messages import Look

ALIKE = 0.98
"""Cosine of two contributions from which on one is taken for a copy of the other. Those of honest
members with different data were below 0.9, also in the first round (`bench.audit`)."""

DECAY = 0.8
"""Share of the past in a member's rating."""

SMALL = 0.5
"""A norm below this share of the middle member's is odd."""


def odd_ones(looks: Mapping[str, Look]) -> dict[str, str]:
    """Return the members of a round whose contribution looks odd, each with the reason."""
    found: dict[str, str] = {}
    if not looks:
        return found
    middle = median(look.norm for look in looks.values())
    usual = median(look.along for look in looks.values())
    for member, look in looks.items():
        if look.alike >= ALIKE:
            found[member] = "it resembles another contribution"
        elif usual > 0 and look.along < -0.5 * usual:
            found[member] = "it points against the others"
        elif look.norm < SMALL * middle:
            found[member] = "it is small"
    return found


def rated(rating: float, *, own: float, held_out: float) -> float:
    """Return a member's rating after one more checked round, -1 to 1.

    `B <- DECAY * B + (1 - DECAY) * (+1 or -1)`, Gauntlet's rating of the same name: +1 if the
    contribution gained more on the member's own data. A single round says little, because losses of
    small batches are noisy.
    """
    return DECAY * rating + (1.0 - DECAY) * (1.0 if own > held_out else -1.0)
