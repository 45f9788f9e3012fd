"""Sums and products whose rounding is the same on every machine.

Library routines (matrix products, long sums, factorisations) add in an order that depends on the
processor. What follows from common values on every member by itself must not: replicas would drift
apart. These use elementwise operations only, which IEEE 754 rounds alike everywhere.

FedNova: members that took different numbers of steps pull equally hard.

Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (https://arxiv.org/abs/2007.07481), equation 8, for inner steps that are all alike.
Legend: H_i optimizer steps of member i since the last round, Delta_i its pseudo-gradient, p_i its
share of the data.

    Delta = tau sum_i p_i Delta_i / H_i,   tau = sum_i p_i H_i

Without it whoever takes more steps moves the common state further, and where the members' data
differ the result is the optimum of other shares than p_i: those of the fast machines grow.

Differs from the paper:
  * p_i is the same for all members, as slots of the data are dealt evenly;
  * a step counts as 1 also with momentum or AdamW, whose steps grow a little over a period.

tau is the mean of the members' H_i, agreed on first in the same round; then each sends
`tau / H_i Delta_i`, so that rules other than a mean, and codecs, see comparable values. Where all
H_i are equal the factor is 1 and nothing is touched: the mean is the plain one to the bit.
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
"""A column that keeps less than this share of its length is taken for a combination of others."""


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum over the first dimension: halves are added until one row is left."""
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

    Gram-Schmidt, each column projected twice; columns that depend on those before become zero.
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
    """Return `left @ right.T` in `out`, shape (n, m), adding one pair of columns after another."""
    out.zero_()
    for index in range(left.shape[1]):
        out += left[:, index : index + 1] * right[:, index]
    return out


def _length(column: Tensor) -> float:
    return float(tree_sum(column * column).sqrt())


def uniform(elements: int, *, seed: int) -> Tensor:
    """Return float32 numbers from -1 to 1 that follow from the seed alone."""
    words = random_words(seed, elements) >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-52 - 1.0).float()


FEDNOVA = "fednova"
"""The word for it where weights are chosen."""

KEY = "steps"
"""Names what tau is made of among the vectors of a round."""

EXACT = "fp32"
"""Codec of the numbers of steps: whole numbers up to 2^24 stay what they are."""


def mean_steps(
    group: Group, *, steps: int, weight: float, resting: AbstractContextManager[None]
) -> tuple[float, int, int]:
    """Return tau, and the bytes sent and received to agree on it.

    Args:
        group: In a round.
        steps: Of this member.
        weight: 1, or 0 for a member that takes no part.
        resting: Held while the others are waited for.
    """
    told = torch.tensor([float(steps)])
    work = group.reduce([told], codec=make_codec(EXACT), weight=weight, key=KEY)
    with resting:
        found = work.wait()
    return float(found.tensors[0]), found.sent_bytes, found.received_bytes


def evened(delta: Tensor, *, num_parameters: int, steps: int, tau: float) -> Tensor:
    """Return what to send: the pseudo-gradient as of `tau` steps; buffers stay as they are.

    Args:
        delta: Parameters, then buffers, (P,); it is not changed, and returned where that is right.
        num_parameters: How many of its values belong to parameters.
        steps: That it is made of.
        tau: Mean of all members' steps.
    """
    if steps < 1 or tau == steps:
        return delta
    sent = delta.clone()
    sent[:num_parameters].mul_(tau / steps)
    return sent
