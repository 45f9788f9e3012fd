"""Methods that combine parameters periodically while training continues."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import Method, Preset, arxiv, option


@dataclass(frozen=True, kw_only=True)
class Streaming(Method):
    """Options of Streaming DiLoCo."""

    name = "streaming"
    implementation = "atoll.strategies.outer.streaming:StreamingOuter"
    pages = "periodic"
    presets = (
        Preset(
            name="streaming-diloco",
            codec="feedback(e3m0)",
            line="DiLoCo one fragment of the model at a time, sent during training",
            good_for="slow links, where sending the whole model at once blocks training",
            papers=(
                arxiv(
                    "2501.18512",
                    "Streaming DiLoCo with overlapping communication: Towards a Distributed Free "
                    "Lunch",
                    2025,
                ),
            ),
        ),
    )

    every: int = option(100, "Optimizer steps between two rounds of the same fragment (H).")
    fragments: int = option(4, "Parts that the model is cut into (F).")
    pattern: str = option(
        "strided",
        "How layers are assigned to fragments: `strided`, or `sequential` for runs of neighbours.",
    )
    delay: int = option(
        1,
        "Steps between the start of a round and applying its result (tau); below H / F.",
    )
    mix: float = option(
        0.5,
        "Share of a member's own parameters in an applied result (alpha): 0 to 1.",
    )
    outer_lr: float = option(0.4, "Learning rate of the outer optimizer.")
    outer_momentum: float = option(
        0.9,
        "Nesterov momentum of the outer optimizer, one velocity per fragment; 0: plain SGD.",
    )
    shared_steps: int = option(
        0,
        "First steps that every member computes on the same data, so that they need no traffic "
        "(built-in trainer only).",
    )
    staggered: bool = option(
        True,
        "Whether fragments take turns; if not, all are combined at the same step, as in DiLoCo.",
    )
    weight: str = option(
        "tokens",
        "Weight of a member's values: `tokens` trained since the last round, or `equal`.",
    )

    @property
    def later_vectors(self) -> float:
        """The momentum of the outer optimizer."""
        return float(self.outer_momentum > 0)

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse overlapping rounds of fragments."""
        every, fragments, delay = self.every, self.fragments, self.delay
        if every < fragments:
            raise ConfigError(
                "there are more fragments than steps between their rounds",
                given=f"every = {every}, fragments = {fragments}",
                expected="at most one fragment a step",
                remedy=f"fragments = {every}, or every = {fragments}",
            )
        gap = every // fragments if self.staggered else every
        if delay >= gap:
            raise ConfigError(
                "a fragment's round would not end before the next one begins",
                given=f"delay = {delay}, every = {every}, fragments = {fragments}",
                expected=f"delay below every / fragments, {gap} here",
                remedy=f"delay = {gap - 1}, or every = {(delay + 1) * fragments}",
            )


@dataclass(frozen=True, kw_only=True)
class Eager(Method):
    """Options of eager DiLoCo."""

    name = "eager"
    implementation = "atoll.strategies.outer.eager:EagerOuter"
    pages = "periodic"
    presets = (
        Preset(
            name="eager-diloco",
            codec="feedback(e3m0)",
            line="DiLoCo with rounds of a whole interval: others' updates arrive one late",
            good_for="links so slow that a round lasts as long as its interval",
            papers=(
                arxiv(
                    "2502.12996",
                    "Eager Updates For Overlapped Communication and Computation in DiLoCo",
                    2025,
                ),
            ),
        ),
    )

    every: int = option(
        100,
        "Optimizer steps between two rounds (H), also the time for a round.",
    )
    outer_lr: float = option(
        0.2,
        "Learning rate of the outer optimizer. With momentum 0.9 a mean that is one period late is "
        "stable up to about 0.25, for any number of members.",
    )
    outer_momentum: float = option(0.9, "Nesterov momentum of the outer optimizer; 0: plain SGD.")
    shared_steps: int = option(
        0,
        "First steps that every member computes on the same data, so that they need no traffic "
        "(built-in trainer only).",
    )
    weight: str = option(
        "tokens",
        "Weight of a member's values: `tokens` trained since the last round, or `equal`.",
    )

    @property
    def later_vectors(self) -> float:
        """The own gradient in flight, and momentum of the shared and the own state."""
        return 1.0 + 2.0 * (self.outer_momentum > 0)
