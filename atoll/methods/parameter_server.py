"""Methods whose members push to parameter servers and pull from them."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import CodecSupport, Method, Paper, Preset, arxiv, option

PUSHED = CodecSupport(
    why="servers apply what single members push as it comes",
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
            line="members send their moves whenever they are done; delayed Nesterov on the server",
            good_for="machines of different speed that should never wait",
            papers=(
                arxiv("2401.09135", "Asynchronous Local-SGD Training for Language Modeling", 2024),
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
    outer_momentum: float = option(0.9, "Its momentum; `sgd` has none.")
    buffer: int = option(
        0,
        "Arrivals per step of delayed Nesterov's momentum (N); 0: as many as there are members.",
    )
    activation: float = option(
        0.0,
        "How much of the momentum every arrival moves already (c), 0 to 1/N.",
    )
    dynamic: bool = option(True, "Whether slow members do fewer steps, by measured speed.")
    staleness: str = option(
        "constant",
        "What a late move counts: `constant` (all of it), `inverse` (1 / lateness) or `power`.",
    )
    staleness_power: float = option(0.5, "The a of `power`: (1 + lateness) ** -a.")
    max_staleness: int = option(0, "Moves that are later than this are dropped; 0: none is.")
    servers: int = option(1, "Parameter servers that the vector is spread over.")
    anchor_every: int = option(
        0,
        "Steps of the schedule between two rounds of all members; 0: ten times `every`.",
    )
    reply: str = option("fp32", "Codec of the vector that comes back: fp32, bf16 or fp16.")


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
            good_for="speeds that vary but even out",
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
            line="servers apply every step as it comes, late ones more gently",
            good_for="a yardstick for asynchronous methods",
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
        "Who waits for whom: `synchronous`, `stale` or `asynchronous`.",
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
        "What a late push counts: `constant` (all of it), `inverse` (1 / lateness) or `power`.",
    )
    staleness_power: float = option(0.5, "The a of `power`: (1 + lateness) ** -a.")
    max_staleness: int = option(0, "Pushes that are later than this are dropped; 0: none is.")
    compensation: float = option(
        0.0,
        "Strength lambda of delay compensation, 0.04 to 2; 0: none. Needs gradients.",
    )
    servers: int = option(1, "Parameter servers that the vector is spread over.")
    anchor_every: int = option(200, "Steps of the schedule between two rounds of all members.")
    reply: str = option("fp32", "Codec of the vector that comes back: fp32, bf16 or fp16.")
    weight: str = option(
        "tokens",
        "What a push weighs in a synchronous mean: the `tokens` of its batch, or `equal`.",
    )

    @property
    def uses_gradients(self) -> bool:
        """Members push gradients unless each takes the step with its own optimizer."""
        return self.optimizer != "member"

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse so many backup workers that no gradient is waited for."""
        if self.backups and self.backups >= min_nodes:
            raise ConfigError(
                "no member would be waited for",
                given=f"backups = {self.backups} with {min_nodes} members",
                expected="backups below the number of members",
                remedy=f"backups = {max(0, min_nodes - 1)}",
            )
