"""Pruned pseudo-gradients: of every neuron only the larger values that agree on a direction.

DiLoCo (https://arxiv.org/abs/2311.08105, section 3.1) prunes what a member sends after TIES-merging
(https://arxiv.org/abs/2306.01708): per neuron a sign is elected, then values are trimmed. Neither
says in which order values go when a share is asked for. Here: a neuron (a row of a matrix, all of
anything with fewer than two dimensions) elects the sign of its sum; first the values of the other
sign go, the smallest first, then the smallest of the rest, until the share is gone.

The vector stays as long as it was: zeros weigh as much as other numbers in a dense codec. Bytes are
saved where a sparse codec follows, e.g. `topk:0.5` after a share of 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.errors import ConfigError


def check_share(share: float) -> float:
    """Return the share if it can be pruned.

    Raises:
        ConfigError: it is not in 0 <= share < 1.
    """
    if not 0 <= share < 1:
        raise ConfigError(
            "this share of an update cannot be pruned",
            given=f"prune = {share}",
            expected="0 up to below 1; up to 0.5 costs next to nothing, 0.75 is seen",
        )
    return share


@torch.no_grad()
def prune(parts: Sequence[Tensor], share: float) -> None:
    """Set a share of every neuron's values to zero, in place; rounded down per neuron.

    Args:
        parts: Pseudo-gradients in the shapes of the parameters, first dimension the neurons.
        share: Which share, 0 <= share < 1.
    """
    for part in parts:
        rows = part.view(part.shape[0], -1) if part.dim() > 1 else part.view(1, -1)
        count = int(share * rows.shape[1])
        if not count:
            continue
        size = rows.abs()
        # Values against the elected sign come before all others, the smallest first.
        against = rows.sum(1, keepdim=True) * rows < 0
        order = torch.where(against, size - size.amax(1, keepdim=True) - 1.0, size)
        rows.scatter_(1, order.topk(count, dim=1, largest=False).indices, 0.0)
