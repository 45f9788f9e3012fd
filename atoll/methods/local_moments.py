"""Methods that average the moments of Adam as well as the parameters."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import Method, Preset, arxiv, option

ADAM = ("", "adamw", "torch:Adam", "torch:AdamW")
"""Inner optimizers with moments to average; empty: unknown yet."""


@dataclass(frozen=True, kw_only=True)
class DesLoc(Method):
    """Options of DES-LOC."""

    name = "desloc"
    implementation = "atoll.strategies.moments.desloc:DesLocOuter"
    pages = "periodic"
    later_vectors = 3.0
    presets = (
        Preset(
            name="des-loc",
            codec="feedback(int8)",
            loss="4 % worse to 8 % better than `diloco`; images: 10 % worse to 23 % better",
            line="Local Adam that averages parameters and both moments, each at its own period",
            good_for="members that come and go: their moments are near each other's",
            papers=(
                arxiv(
                    "2505.22549",
                    "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training "
                    "Foundation Models",
                    2025,
                ),
            ),
        ),
    )

    every: int = option(32, "Optimizer steps between two rounds of the parameters (K_x).")
    momentum_rounds: int = option(
        3, "Rounds between two averages of the first moment (K_u / K_x); 0: never."
    )
    variance_rounds: int = option(
        6, "Rounds between two averages of the second moment (K_v / K_x); 0: never."
    )
    moments: str = option(
        "bf16", "Codec of the moments: bf16 or fp32, which round no small variance to zero."
    )
    weight: str = option(
        "tokens",
        "Weight of a member's values: `tokens` trained since the last round, `equal`, or "
        "`fednova`: equal, and as if all had taken the same number of steps.",
    )

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse inner optimizers that are not Adam."""
        if optimizer not in ADAM:
            raise ConfigError(
                f"{self.name} averages the moments of Adam, and this optimizer has others",
                given=f"optimizer = {optimizer!r} in [train]",
                expected='optimizer = "adamw"',
                remedy='optimizer = "adamw", or preset = "local-sgd" for any other',
            )


@dataclass(frozen=True, kw_only=True)
class MTDAO(DesLoc):
    """Options of MT-DAO."""

    name = "mtdao"
    implementation = "atoll.strategies.moments.mtdao:MTDAOOuter"
    presets = (
        Preset(
            name="mt-dao",
            codec="feedback(int8)",
            loss="within 5 % of `diloco`; images: 9 % worse to 31 % better",
            line="Local Adam with a second, slow momentum that outlasts a round",
            good_for="long intervals, where Adam's own momentum forgets the common direction",
            papers=(
                arxiv(
                    "2510.05361",
                    "MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates",
                    2025,
                ),
            ),
        ),
    )
    later_vectors = 5.0

    slow_beta: float = option(
        0.98,
        "Decay of the slow momentum; beta^K should be above 1/2 for K steps between rounds.",
    )
    slow_weight: float = option(
        0.2, "Share of the slow momentum in a step (omega): 0 to 1; 0 is DES-LOC."
    )
    slow_rounds: int = option(1, "Rounds between two averages of the slow momentum; 0: never.")
