"""Methods with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import CodecSupport, Method, Paper, Preset, arxiv, option

PUSHED = CodecSupport(
    why="servers apply the pushes of single members on arrival",
    refused=frozenset({"ef21"}), nearest="feedback(int8)",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Method):
    """Options of asynchronous Local SGD."""

    name = "asynchronous"
    implementation = "atoll.strategies.parameter_server.asynchronous:AsynchronousOuter"
    pages = "parameter_server"
    has_mean = False
    needs_servers = True
    codecs = PUSHED
    presets = (
        Preset(
            name="async-diloco",
            codec="feedback(int8)",
            loss="8 % worse to 8 % better than `diloco`; images: 1 to 54 % worse",
            line="members push updates when they are ready; delayed Nesterov on the server",
            good_for="machines of different speed that should never wait",
            papers=(
                arxiv("2401.09135", "Asynchronous Local-SGD Training for Language Modeling", 2024),
            ),
        ),
        Preset(
            name="async-look-ahead",
            codec="feedback(int8)",
            options={"look_ahead": 1.0},
            line="`async-diloco` whose members train from where momentum will have moved the model",
            good_for="many members at a server: each update arrives that much later",
            papers=(
                Paper(
                    "Momentum Look-Ahead for Asynchronous Distributed Low-Communication Training",
                    2025,
                    "https://openreview.net/forum?id=4O8nzTkHPI",
                ),
            ),
        ),
    )

    every: int = option(50, "Optimizer steps between two pushes of the fastest member (H).")
    outer_optimizer: str = option(
        "delayed-nesterov",
        "What the server does with a move: `delayed-nesterov`; or, one by one as they come, "
        "`nesterov`, `momentum` or `sgd`.",
    )
    outer_lr: float = option(0.7, "Its rate.")
    outer_momentum: float = option(0.5, "Its momentum; `sgd` has none.")
    buffer: int = option(
        0,
        "Pushes per step of delayed Nesterov's momentum (N); 0: as many as there are members.",
    )
    activation: float = option(
        0.0,
        "Share of the momentum applied with every push (c), 0 to 1/N.",
    )
    look_ahead: float = option(
        0.0,
        "Part of the way momentum will go until a member's next push that its vector is ahead; "
        "0: none.",
    )
    dynamic: bool = option(True, "Whether slow members do fewer steps, by measured speed.")
    staleness: str = option(
        "constant",
        "Weight of a late update: `constant` (full), `inverse` (1 / lateness) or `power`.",
    )
    staleness_power: float = option(0.5, "The a of `power`: (1 + lateness) ** -a.")
    max_staleness: int = option(0, "Updates later than this are dropped; 0: none.")
    servers: int = option(1, "Parameter servers that the vector is spread over.")
    anchor_every: int = option(
        0,
        "Steps of the schedule between two rounds of all members; 0: ten times `every`.",
    )
    reply: str = option("fp32", "Codec of the vector in answers: fp32, bf16 or fp16.")


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Method):
    """Options of hierarchical asynchronous Local SGD."""

    name = "hierarchical"
    implementation = "atoll.strategies.parameter_server.hierarchical:HierarchicalOuter"
    pages = "parameter_server"
    has_mean = False
    needs_servers = True
    codecs = PUSHED
    presets = (
        Preset(
            name="halos",
            codec="feedback(int8)",
            line="`async-diloco` with a model per region, merged into a global one now and then",
            good_for="groups of members that learn different things; it sends no fewer bytes",
            papers=(
                arxiv(
                    "2506.04531",
                    "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for "
                    "Geo-Distributed Large Language Model Training",
                    2025,
                ),
            ),
        ),
    )

    every: int = option(50, "Optimizer steps between two pushes of the fastest member (H).")
    regions: int = option(2, "Groups of members of neighbouring slots, each with a model.")
    merge_every: int = option(8, "Pushes of a region's members between two merges (K).")
    mix: float = option(
        0.5, "Part of the way that a region's model goes to the global one in a merge (alpha)."
    )
    region_optimizer: str = option(
        "delayed-nesterov",
        "What is done with a push on its region's model: `delayed-nesterov`, whose N is the "
        "members of a region; or `nesterov`, `momentum` or `sgd`.",
    )
    region_lr: float = option(0.7, "Its rate.")
    region_momentum: float = option(0.5, "Its momentum; `sgd` has none.")
    outer_optimizer: str = option(
        "delayed-nesterov",
        "What is done with a region's update on the global model, as above.",
    )
    outer_lr: float = option(0.5, "Its rate.")
    outer_momentum: float = option(0.5, "Its momentum; `sgd` has none.")
    buffer: int = option(
        0,
        "Merges per step of the global delayed Nesterov's momentum (N); 0: as many as regions.",
    )
    dynamic: bool = option(True, "Whether slow members do fewer steps, by measured speed.")
    servers: int = option(1, "Parameter servers that the vectors are spread over.")
    anchor_every: int = option(
        0,
        "Steps of the schedule between two rounds of all members, in which all regions merge; 0: "
        "twenty times `every`.",
    )
    reply: str = option("fp32", "Codec of the vector in answers: fp32, bf16 or fp16.")

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse more regions than members; a member alone has no use for any."""
        if 1 < nodes < self.regions:
            raise ConfigError(
                "there are regions without members",
                given=f"regions = {self.regions} with {nodes} members",
                expected="at most one for each member", remedy=f"regions = {nodes}",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Server(Method):
    """Options of training with parameter servers."""

    name = "server"
    implementation = "atoll.strategies.parameter_server.server:ServerOuter"
    pages = "parameter_server"
    has_mean = False
    needs_servers = True
    codecs = PUSHED
    presets = (
        Preset(
            name="parameter-server",
            line="servers apply the mean of every step; with backups the slowest are not waited "
            "for",
            good_for="per-step training with a few slow members",
            papers=(arxiv("1604.00981", "Revisiting Distributed Synchronous SGD", 2016),),
        ),
        Preset(
            name="stale-synchronous",
            options={"mode": "stale", "bound": 3},
            line="no member gets more than s steps ahead of the slowest",
            good_for="speeds that vary around the same mean",
            papers=(
                Paper(
                    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter "
                    "Server",
                    2013,
                    "https://papers.nips.cc/paper/4894",
                ),
            ),
        ),
        Preset(
            name="async-sgd",
            options={"mode": "asynchronous", "staleness": "inverse"},
            line="servers apply every step on arrival, late ones with less weight",
            good_for="a baseline for asynchronous methods",
            papers=(
                arxiv(
                    "1511.05950", "Staleness-aware Async-SGD for Distributed Deep Learning", 2015
                ),
                arxiv(
                    "1609.08326",
                    "Asynchronous Stochastic Gradient Descent with Delay Compensation",
                    2016,
                ),
            ),
        ),
    )

    mode: str = option(
        "synchronous",
        "Consistency of clocks: `synchronous`, `stale` or `asynchronous`.",
    )
    backups: int = option(0, "How many members a clock does not wait for (synchronous).")
    bound: int = option(3, "How many clocks a member may be ahead of the slowest (stale).")
    optimizer: str = option(
        "member",
        "Who takes the step: each `member` with its own optimizer, or the servers with `sgd`, "
        "`momentum` or `nesterov` at the members' rate.",
    )
    momentum: float = option(
        0.9,
        "Of `momentum` and `nesterov`. Asynchrony acts like momentum: less with more members.",
    )
    staleness: str = option(
        "constant",
        "Weight of a late push: `constant` (full), `inverse` (1 / lateness) or `power`.",
    )
    staleness_power: float = option(0.5, "The a of `power`: (1 + lateness) ** -a.")
    max_staleness: int = option(0, "Pushes later than this are dropped; 0: none.")
    compensation: float = option(
        0.0,
        "Strength lambda of delay compensation, 0.04 to 2; 0: none. Needs gradients.",
    )
    look_ahead: float = option(
        0.0,
        "Part of the way momentum will go until a member's next push that its vector is ahead; "
        "0: none. Needs momentum of the servers.",
    )
    servers: int = option(1, "Parameter servers that the vector is spread over.")
    anchor_every: int = option(200, "Steps of the schedule between two rounds of all members.")
    reply: str = option("fp32", "Codec of the vector in answers: fp32, bf16 or fp16.")
    weight: str = option(
        "tokens",
        "Weight of a push in a synchronous mean: the `tokens` of its batch, or `equal`.",
    )

    @property
    def uses_gradients(self) -> bool:
        """Members push gradients unless each steps with its own optimizer."""
        return self.optimizer != "member"

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse so many backup workers that the servers wait for no gradient."""
        if self.backups and self.backups >= min_nodes:
            raise ConfigError(
                "no member is left to wait for",
                given=f"backups = {self.backups} with {min_nodes} members",
                expected="backups below the number of members",
                remedy=f"backups = {max(0, min_nodes - 1)}",
            )
