"""Sums and products with the same rounding on every machine, and FedNova's normalization.

Library routines (matrix products, long sums, factorisations) add in an order that depends on the
processor. Replicas would drift apart if each computed something from common values with them. The
functions here use elementwise operations only, which IEEE 754 rounds alike everywhere.

FedNova makes members that took different numbers of steps contribute equally.

Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (https://arxiv.org/abs/2007.07481), equation 8, for inner steps that are all alike.
Legend: H_i optimizer steps of member i since the last round, Delta_i its pseudo-gradient, p_i its
share of the data.

    Delta = tau sum_i p_i Delta_i / H_i,   tau = sum_i p_i H_i

Without it a member that takes more steps moves the common state further; where the members' data
differ, the result is then the optimum for a mixture that favours the fast machines.

Differs from the paper:
  * p_i is the same for all members, because data slots are assigned evenly;
  * a step counts as 1 also with momentum or AdamW, whose steps grow a little over a period.

tau, the mean of the members' H_i, is agreed on first in the same round; then each member sends `tau
/ H_i Delta_i`, so that codecs and rules other than a mean see comparable values. If all H_i are
equal the factor is 1 and the result is the plain mean, bit for bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.codec.seeds import random_words
from atoll.group.base import Group

DEPENDENT = 1e-6
"""A column that keeps less than this share of its length counts as linearly dependent."""


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum over the first dimension by adding halves until one row is left."""
    if not x.shape[0]:
        return x.new_zeros(x.shape[1:])
    while x.shape[0] > 1:
        half = (x.shape[0] + 1) // 2
        upper = x[:half].clone()
        upper[: x.shape[0] - half] += x[half:]
        x = upper
    return x[0]


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns of the same span, float64, shape (n, r).

    Gram-Schmidt, projecting each column twice; linearly dependent columns become zero.
    """
    basis = columns.double().clone()
    for index in range(basis.shape[1]):
        column = basis[:, index].clone()
        before = _length(column)
        for _ in range(2 if index else 0):
            shares = tree_sum(basis[:, :index] * column.unsqueeze(1))
            for earlier, share in enumerate(shares):
                column -= basis[:, earlier] * share
        after = _length(column)
        basis[:, index] = column / after if after > DEPENDENT * before else 0.0
    return basis


def outer_sum(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """Return `left @ right.T` in `out`, shape (n, m), adding one pair of columns at a time."""
    out.zero_()
    for index in range(left.shape[1]):
        out += left[:, index : index + 1] * right[:, index]
    return out


def _length(column: Tensor) -> float:
    return float(tree_sum(column * column).sqrt())


def uniform(elements: int, *, seed: int) -> Tensor:
    """Return float32 numbers in -1 to 1, determined by the seed."""
    words = random_words(seed, elements) >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-52 - 1.0).float()


FEDNOVA = "fednova"
"""The option value that selects FedNova weights."""

KEY = "steps"
"""Key of the exchange from which tau is computed."""

EXACT = "fp32"
"""Codec of the step counts: integers up to 2^24 are exact."""


def mean_steps(
    group: Group, *, steps: int, weight: float, resting: AbstractContextManager[None]
) -> tuple[float, int, int]:
    """Return tau, and the bytes sent and received to agree on it.

    Args:
        group: In a round.
        steps: Of this member.
        weight: 1, or 0 for a member that does not contribute.
        resting: Held while waiting for the others.
    """
    own = torch.tensor([float(steps)])
    work = group.reduce([own], codec=make_codec(EXACT), weight=weight, key=KEY)
    with resting:
        found = work.wait()
    return float(found.tensors[0]), found.sent_bytes, found.received_bytes


def evened(delta: Tensor, *, num_parameters: int, steps: int, tau: float) -> Tensor:
    """Return the pseudo-gradient scaled to `tau` steps; buffers are unchanged.

    Args:
        delta: Parameters, then buffers, (P,); not modified, and returned as it is if the factor is
            1.
        num_parameters: How many of its values belong to parameters.
        steps: Steps this member took.
        tau: Mean of all members' steps.
    """
    if steps < 1 or tau == steps:
        return delta
    sent = delta.clone()
    sent[:num_parameters].mul_(tau / steps)
    return sent
