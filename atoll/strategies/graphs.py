"""Communication graphs of decentralized methods, their mixing weights, and their spectral gap.

Row i of a matrix W gives member i's weights: x_i = sum_j W_ij x_j. Rows that add up to 1 preserve a
common value; columns that add up to 1 preserve the mean. The spectral gap is 1 - rho, with rho the
second largest absolute eigenvalue: the distance from the mean shrinks by rho in every round.

Weights of undirected graphs are those of Metropolis and Hastings (Xiao, Boyd 2004, "Fast linear
iterations for distributed averaging"); exponential graphs are those of Assran et al. 2019
(https://arxiv.org/abs/1811.10792) and Ying et al. 2021 (https://arxiv.org/abs/2110.13363).
Legend: n members, i the receiver, j the sender.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from atoll.errors import unknown

Neighbours = list[list[int]]
"""Per member, the ordered list of members whose values it receives."""

SEED = 0x5EED
"""Seed of the random graphs, equal on every member."""


def ring(n: int, round_: int) -> Neighbours:
    """Return the neighbours on both sides."""
    return [_others(i, [i - 1, i + 1], n) for i in range(n)]


def torus(n: int, round_: int) -> Neighbours:
    """Return the neighbours above, below and on both sides in a grid as square as n allows."""
    rows = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
    columns = n // rows
    found: Neighbours = []
    for i in range(n):
        row, column = divmod(i, columns)
        beside = [row * columns + (column + step) % columns for step in (-1, 1)]
        above = [(row + step) % rows * columns + column for step in (-1, 1)]
        found.append(_others(i, beside + above, n))
    return found


def exponential(n: int, round_: int) -> Neighbours:
    """Return the members 1, 2, 4, ... positions further on."""
    return [_others(i, [i + 2**k for k in range(_doublings(n))], n) for i in range(n)]


def one_peer(n: int, round_: int) -> Neighbours:
    """Return one of the neighbours of :func:`exponential`, a different one in every round."""
    distance = 2 ** (round_ % max(1, _doublings(n)))
    return [_others(i, [i + distance], n) for i in range(n)]


def complete(n: int, round_: int) -> Neighbours:
    """Return all other members."""
    return [_others(i, range(n), n) for i in range(n)]


def random_peer(n: int, round_: int) -> Neighbours:
    """Let each member send to one random other: some receive several values, some none."""
    generator = random.Random(SEED + round_)
    found: Neighbours = [[] for _ in range(n)]
    for sender in range(n if n > 1 else 0):
        receiver = generator.randrange(n - 1)
        found[receiver + (receiver >= sender)].append(sender)
    return found


UNDIRECTED: dict[str, Callable[[int, int], Neighbours]] = {
    "ring": ring, "torus": torus, "complete": complete,
}  # fmt: skip
"""Graphs whose edges go both ways."""

DIRECTED: dict[str, Callable[[int, int], Neighbours]] = {
    "exponential": exponential, "one-peer": one_peer,
}  # fmt: skip
"""Graphs in which all members have as many receivers as senders."""

UNEVEN: dict[str, Callable[[int, int], Neighbours]] = {"random": random_peer}
"""Graphs that need push-sum: receivers do not know how much a sender gives away."""

GRAPHS = {**UNDIRECTED, **DIRECTED, **UNEVEN}


def neighbours(graph: str, n: int, *, round_: int = 0) -> Neighbours:
    """Return the members whose values each of n members receives in a round.

    Raises:
        ConfigError: there is no such graph; the nearest one is named.
    """
    if graph not in GRAPHS:
        raise unknown("graph", graph, GRAPHS)
    return GRAPHS[graph](n, round_)


def mixing(graph: str, n: int, *, round_: int = 0) -> Tensor:
    """Return the weights of plain averaging, float64, shape (n, n); rows add up to 1.

    Columns do too, except for graphs that need push-sum.

    Raises:
        ConfigError: there is no such graph.
    """
    found = neighbours(graph, n, round_=round_)
    weights = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for i, senders in enumerate(found):
        for j in senders:
            weights[i, j] = 1.0 / (1 + max(len(senders), len(found[j])))
            if graph not in UNDIRECTED:
                weights[i, j] = 1.0 / (1 + len(senders))
    return weights + torch.diag(1.0 - weights.sum(1))


def pushing(graph: str, n: int, *, round_: int = 0) -> Tensor:
    """Return the weights of push-sum, float64, shape (n, n); columns add up to 1.

    Every member splits its value equally among its receivers and itself.

    Raises:
        ConfigError: there is no such graph.
    """
    found = neighbours(graph, n, round_=round_)
    weights = torch.eye(n, dtype=torch.float64, device="cpu")
    for i, senders in enumerate(found):
        weights[i, senders] = 1.0
    return weights / weights.sum(0, keepdim=True)


def pairs(n: int, *, round_: int) -> list[int]:
    """Return each member's partner in a random matching; its own index if it has none.

    With an odd number one member, drawn anew every round, sits out.
    """
    order = list(range(n))
    random.Random(SEED ^ (round_ << 1 | 1)).shuffle(order)
    partners = list(range(n))
    for a, b in zip(order[0::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return partners


def spectral_gap(weights: Tensor) -> float:
    """Return 1 - rho of a mixing matrix; 1 means consensus after one round."""
    # The general solver may not converge with repeated eigenvalues, as in the complete graph.
    symmetric = torch.equal(weights, weights.T)
    values = (torch.linalg.eigvalsh if symmetric else torch.linalg.eigvals)(weights)
    found = values.abs().sort(descending=True).values
    return 1.0 - float(found[1]) if len(found) > 1 else 1.0


def _others(me: int, places: range | list[int], n: int) -> list[int]:
    """Return the members at these positions, each once, without this one."""
    return sorted({place % n for place in places} - {me})


def _doublings(n: int) -> int:
    """Return how often 1 must be doubled to reach n."""
    return (n - 1).bit_length()
