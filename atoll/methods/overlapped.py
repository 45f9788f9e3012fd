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
            options={"shared_steps": 170},
            by_rounds=True,
            loss="as `diloco`, within 4 %; images: 3 to 11 % worse",
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
    delay: int | str = option(
        "auto",
        "Steps between the start of a round and applying its result (tau), below H / F; `auto`: as "
        "many as a round takes on the members' links, by measured times; `auto:N`: N until then.",
    )
    mix: float = option(
        0.0,
        "Share of a member's own parameters in an applied result (alpha): 0 to 1.",
    )
    outer_lr: float = option(0.7, "Learning rate of the outer optimizer.")
    outer_momentum: float = option(
        0.5,
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
        every, fragments = self.every, self.fragments
        if fragments < 1:
            raise ConfigError(
                "a model is cut into one fragment or more", given=f"fragments = {fragments}",
                expected="1 or more", remedy="fragments = 4",
            )  # fmt: skip
        delay = 0 if isinstance(self.delay, str) else self.delay
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
            options={"shared_steps": 170},
            loss="5 to 11 % worse than `diloco`; images: 15 to 40 %",
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
        0.7,
        "Learning rate of the outer optimizer. A mean that is one period late bears less than "
        "DiLoCo's: with momentum 0.9 about 0.25, for any number of members.",
    )
    outer_momentum: float = option(0.0, "Nesterov momentum of the outer optimizer; 0: plain SGD.")
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
        """The member's own gradient in flight, and momentum of the shared and of its own state."""
        return 1.0 + 2.0 * (self.outer_momentum > 0)


@dataclass(frozen=True, kw_only=True)
class Decoupled(Streaming):
    """Options of Decoupled DiLoCo."""

    name = "decoupled"
    implementation = "atoll.strategies.outer.decoupled:DecoupledOuter"
    presets = (
        Preset(
            name="decoupled-diloco",
            codec="feedback(int4)",
            options={"shared_steps": 170},
            loss="as `diloco`, within 4 %; images: 1 to 54 % worse",
            line="fragments that no member waits for; directions and lengths averaged apart",
            good_for="members of different speed that must not stop each other",
            papers=(
                arxiv(
                    "2604.21428",
                    "Decoupled DiLoCo for Resilient Distributed Pre-training",
                    2026,
                ),
            ),
        ),
    )

    delay: int | str = option(
        1,
        "Steps between the start of a round and the first at which its result may be applied.",
    )
    mix: float = option(
        0.0,
        "Share of a member's own parameters in an applied result (alpha): 0 to 1.",
    )
    grace: int = option(
        5,
        "Steps that a member goes on beyond `delay` if the round is not over; then it waits.",
    )
    merge: str = option(
        "radial",
        "How updates become one: `radial` (mean direction times mean length of every tensor) or "
        "`mean`.",
    )
    outer_lr: float = option(0.5, "Learning rate of the outer optimizer.")
    outer_momentum: float = option(
        0.5,
        "Nesterov momentum of the outer optimizer, one velocity per fragment; 0: plain SGD.",
    )
    weight: str = option(
        "rate",
        "Weight of a member's values: `rate` (tokens times tokens per step), `tokens` or `equal`.",
    )

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse rounds of fragments that overlap, and a grace that lasts into the next round."""
        super().check(nodes=nodes, min_nodes=min_nodes, optimizer=optimizer)
        gap = self.every // self.fragments if self.staggered else self.every
        delay = 0 if isinstance(self.delay, str) else self.delay
        if delay + self.grace >= gap:
            raise ConfigError(
                "a member would go on into the next fragment's round",
                given=f"delay = {self.delay}, grace = {self.grace}, every = {self.every}, "
                f"fragments = {self.fragments}",
                expected=f"delay + grace below every / fragments, {gap} here",
                remedy=f"grace = {gap - 1 - delay}",
            )
