"""Methods in which members exchange models with few others, and none holds the mean of all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import CodecSupport, Method, Preset, arxiv, option

WHOLE_MODELS = CodecSupport(
    why="members need each other's whole parameters, not differences",
    one_mean=True, refused=frozenset({"ef21", "randomk"}), nearest="int8",
)  # fmt: skip


def is_grid(members: int) -> bool:
    """Return whether members fill rows and columns of two or more each."""
    return any(members % rows == 0 for rows in range(2, math.isqrt(members) + 1))


@dataclass(frozen=True, kw_only=True)
class Gossip(Method):
    """Options of gossip."""

    name = "gossip"
    implementation = "atoll.strategies.outer.gossip:GossipOuter"
    pages = "gossip"
    has_mean = False
    codecs = WHOLE_MODELS
    presets = (
        Preset(
            name="d-psgd",
            line="every step mixes the parameters with those of the neighbours in a graph",
            good_for="no place that could add up for all; a ring sends the same for any number of "
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
            good_for="members that can send to others but not hear back in the same step",
            papers=(
                arxiv("1811.10792", "Stochastic Gradient Push for Distributed Deep Learning", 2018),
            ),
        ),
    )

    graph: str = option(
        "ring",
        "Who talks to whom: `ring`, `torus`, `exponential`, `one-peer`, `complete`; with push- "
        "sum also `random`.",
    )
    every: int = option(1, "Optimizer steps between two rounds.")
    push_sum: bool = option(
        False,
        "Whether members send parts of themselves and keep track of their mass, for graphs in "
        "which some get more than they give.",
    )

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse graphs that the number of members or the averaging does not allow."""
        if self.graph == "random" and not self.push_sum:
            raise ConfigError(
                "in this graph some members get more than they give, which biases their mean",
                given='graph = "random" without push_sum',
                expected="push_sum = true, which undoes the bias",
                remedy='push_sum = true, or graph = "one-peer"',
            )
        if self.graph == "torus" and nodes > 1 and not is_grid(nodes):
            above = next(n for n in range(nodes, 2 * nodes + 9) if is_grid(n))
            raise ConfigError(
                "so many members make no torus",
                given=f"nodes = {nodes}",
                expected="a grid of at least 2 x 2 members, e.g. 4, 6, 8, 9 or 12",
                remedy=f'nodes = {above}, or graph = "exponential"',
            )


@dataclass(frozen=True, kw_only=True)
class Pairwise(Method):
    """Options of meetings in pairs."""

    name = "pairwise"
    implementation = "atoll.strategies.outer.pairwise:PairwiseOuter"
    pages = "gossip"
    has_mean = False
    codecs = WHOLE_MODELS
    presets = (
        Preset(
            name="ad-psgd",
            line="now and then two members meet in the middle, without waiting for the rest",
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

    every: int = option(1, "Least optimizer steps between the begins of two meetings.")
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
            line="DiLoCo in random pairs: no process adds up for all",
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
    outer_lr: float = option(0.7, "Rate of what a pair has learned (beta).")
    outer_momentum: float = option(0.5, "Momentum of the outer step (alpha).")
    pull: float = option(0.9, "How strongly the parameters of a pair are pulled together (gamma).")
