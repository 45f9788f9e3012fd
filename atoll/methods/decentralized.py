"""Methods in which members exchange models with few others, without a global mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import CodecSupport, Method, Preset, arxiv, option

WHOLE_MODELS = CodecSupport(
    why="members need whole parameters of each other, not differences",
    one_mean=True, refused=frozenset({"ef21", "randomk"}), nearest="int8",
)  # fmt: skip


def is_grid(members: int) -> bool:
    """Return whether members fill a grid of at least 2 x 2."""
    return any(members % rows == 0 for rows in range(2, math.isqrt(members) + 1))


@dataclass(frozen=True, kw_only=True)
class Gossip(Method):
    """Options of gossip averaging."""

    name = "gossip"
    implementation = "atoll.strategies.outer.gossip:GossipOuter"
    pages = "gossip"
    has_mean = False
    codecs = WHOLE_MODELS
    presets = (
        Preset(
            name="d-psgd",
            line="every step mixes the parameters with those of the neighbours in a graph",
            good_for="no central reducer; the traffic in a ring does not grow with the number of "
            "members",
            papers=(
                arxiv(
                    "1705.09056",
                    "Can Decentralized Algorithms Outperform Centralized Algorithms?",
                    2017,
                ),
            ),
        ),
        Preset(
            name="one-peer-exponential",
            options={"graph": "one-peer"},
            line="gossip with one peer per step, 1, 2, 4, ... places away",
            good_for="gossip that mixes as fast as possible for one model per step",
            papers=(
                arxiv(
                    "2110.13363",
                    "Exponential Graph is Provably Efficient for Decentralized Deep Training",
                    2021,
                ),
            ),
        ),
        Preset(
            name="push-sum",
            options={"graph": "random", "push_sum": True},
            line="gossip along directed links, with weights that undo the bias",
            good_for="members that send without an answer in the same step",
            papers=(
                arxiv("1811.10792", "Stochastic Gradient Push for Distributed Deep Learning", 2018),
            ),
        ),
    )

    graph: str = option(
        "ring",
        "Communication graph: `ring`, `torus`, `exponential`, `one-peer`, `complete`; with "
        "push_sum also `random`.",
    )
    every: int = option(1, "Optimizer steps between two rounds.")
    push_sum: bool = option(
        False,
        "Whether members send parts of themselves and keep track of their mass, for graphs in "
        "which some get more than they give.",
    )

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse graphs that do not fit the number of members or the averaging."""
        if self.graph == "random" and not self.push_sum:
            raise ConfigError(
                "in this graph members receive different total weights, which biases their mean",
                given='graph = "random" without push_sum',
                expected="push_sum = true, which undoes the bias",
                remedy='push_sum = true, or graph = "one-peer"',
            )
        if self.graph == "torus" and nodes > 1 and not is_grid(nodes):
            above = next(n for n in range(nodes, 2 * nodes + 9) if is_grid(n))
            raise ConfigError(
                "this number of members does not form a torus",
                given=f"nodes = {nodes}",
                expected="a grid of at least 2 x 2 members, e.g. 4, 6, 8, 9 or 12",
                remedy=f'nodes = {above}, or graph = "exponential"',
            )


@dataclass(frozen=True, kw_only=True)
class Pairwise(Method):
    """Options of asynchronous pairwise averaging."""

    name = "pairwise"
    implementation = "atoll.strategies.outer.pairwise:PairwiseOuter"
    pages = "gossip"
    has_mean = False
    codecs = WHOLE_MODELS
    presets = (
        Preset(
            name="ad-psgd",
            line="pairs of members average occasionally, without waiting for the rest",
            good_for="members of very different speed",
            papers=(
                arxiv(
                    "1710.06952",
                    "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
                    2017,
                ),
            ),
        ),
    )

    every: int = option(1, "Minimum optimizer steps between the starts of two meetings.")
    delay: int = option(
        0,
        "Steps after which a meeting's result is taken, and waited for if need be; 0: as soon "
        "as it is there, without ever waiting.",
    )


@dataclass(frozen=True, kw_only=True)
class NoLoCo(Method):
    """Options of NoLoCo."""

    name = "noloco"
    implementation = "atoll.strategies.outer.noloco:NoLoCoOuter"
    pages = "gossip"
    has_mean = False
    codecs = WHOLE_MODELS
    presets = (
        Preset(
            name="noloco",
            line="DiLoCo in random pairs, without a central reducer",
            good_for="many members, or links whose delay makes a common round long",
            papers=(
                arxiv(
                    "2506.10911",
                    "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
                    2025,
                ),
            ),
        ),
    )

    every: int = option(50, "Optimizer steps between two rounds (H).")
    outer_lr: float = option(0.7, "Learning rate of a pair's mean update (beta).")
    outer_momentum: float = option(0.5, "Momentum of the outer step (alpha).")
    pull: float = option(0.9, "How strongly the parameters of a pair are pulled together (gamma).")
