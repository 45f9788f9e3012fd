"""Methods that communicate in every step."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.methods.method import CodecSupport, Method, Paper, Preset, arxiv, option


@dataclass(frozen=True, kw_only=True)
class EveryStep(Method):
    """Options of data parallel training."""

    name = "every_step"
    implementation = "atoll.strategies.outer.every_step:EveryStepOuter"
    pages = "every_step"
    uses_gradients = True
    per_stage = True
    presets = (
        Preset(
            name="ddp",
            line="the mean of all gradients in every step",
            good_for="fast links; the baseline for the methods below",
            papers=(
                arxiv(
                    "2006.15704",
                    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
                    2020,
                ),
                arxiv(
                    "1706.02677", "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017
                ),
            ),
        ),
        Preset(
            name="swarm",
            inner="swarm",
            line="a model in stages, each on several members; microbatches find their path",
            good_for="a model that no machine can hold, on machines that come and go",
            papers=(
                arxiv(
                    "2301.11913",
                    "SWARM Parallelism: Training Large Models Can Be Surprisingly "
                    "Communication-Efficient",
                    2023,
                ),
            ),
        ),
    )

    weight: str = option(
        "tokens",
        "Weight of a member's gradient: the `tokens` of its batch, or `equal`.",
    )
    reduction: str = option(
        "average",
        "The weighted `average` of gradients, or their `sum`: average times number of members.",
    )
    lr_scaling: str = option(
        "none",
        "Factor of the learning rate: members (`linear`, for SGD) or their root (`sqrt`).",
    )
    lr_warmup: int = option(
        0,
        "Steps in which the rate grows from that of one member to the scaled one.",
    )


@dataclass(frozen=True, kw_only=True)
class Sparta(Method):
    """Options of SPARTA."""

    name = "sparta"
    implementation = "atoll.strategies.outer.sparta:SpartaOuter"
    pages = "every_step"
    codecs = CodecSupport(
        why="parameters themselves are sent, different ones in every step",
        precise_only=True, nearest="int8",
    )  # fmt: skip
    presets = (
        Preset(
            name="sparta",
            line="in every step a random half per cent of the parameters is averaged",
            good_for="small, even traffic; with DiLoCo it allows longer intervals",
            papers=(
                Paper(
                    "Improving the Efficiency of Distributed Training using Sparse Parameter "
                    "Averaging",
                    2025,
                    "https://openreview.net/forum?id=stFPf3gzq1",
                ),
            ),
        ),
    )

    probability: float = option(0.005, "Share of the parameters that is averaged in a step (p).")
    mask: str = option(
        "random",
        "Positions are drawn anew in every step (`random`), or move on, so that after 1/p "
        "steps each was averaged once (`rolled`).",
    )
    seed: int = option(0, "Of the positions; the same on every member.")
    every: int = option(
        0,
        "Steps between two outer steps on all parameters (H), as in DiLoCo; 0: none.",
    )
    outer_lr: float = option(0.7, "Learning rate of the outer optimizer.")
    outer_momentum: float = option(0.9, "Nesterov momentum of the outer optimizer.")
    weight: str = option(
        "tokens",
        "Weight of a member's values: the `tokens` of its batch, or `equal`.",
    )

    @property
    def later_vectors(self) -> float:
        """The momentum of the outer optimizer, if there is one."""
        return float(self.every > 0 and self.outer_momentum > 0)


@dataclass(frozen=True, kw_only=True)
class DeMo(Method):
    """Options of DeMo."""

    name = "demo"
    implementation = "atoll.strategies.outer.demo:DeMoOuter"
    pages = "every_step"
    has_mean = False
    later_vectors = 1.0
    uses_gradients = True
    codecs = CodecSupport(
        why="what is not sent stays in its momentum, other components in every step",
        one_mean=True, memory=False, nearest="bf16",
    )  # fmt: skip
    presets = (
        Preset(
            name="demo",
            codec="bf16",
            line="fast-moving DCT components of the momentum, and only their signs move the model",
            good_for="per-step training over the internet without an optimizer state to share",
            papers=(arxiv("2411.19870", "DeMo: Decoupled Momentum Optimization", 2024),),
        ),
    )

    decay: float = option(0.999, "Of the momentum, per step (beta).")
    topk: int = option(32, "Coefficients sent of every piece (k).")
    side: int = option(64, "Largest side of a piece.")
    weight: str = option(
        "equal",
        "Weight of a member's coefficients: all the same, or the `tokens` of its batch.",
    )


@dataclass(frozen=True, kw_only=True)
class Cocktail(Method):
    """Options of CocktailSGD."""

    name = "cocktail"
    implementation = "atoll.strategies.outer.cocktail:CocktailOuter"
    pages = "every_step"
    has_mean = False
    codecs = CodecSupport(
        why="it applies error feedback itself", memory=False, nearest="topk:0.2|int4"
    )
    presets = (
        Preset(
            name="cocktail-sgd",
            codec="topk:0.2|int4",
            line="model differences, random + top-k + few bits both ways, one step late",
            good_for="fine-tuning in every step over hundreds of Mbit/s",
            papers=(
                Paper(
                    "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks",
                    2023,
                    "https://proceedings.mlr.press/v202/wang23t.html",
                ),
            ),
        ),
    )

    probability: float = option(
        0.1,
        "Share of the parameters that takes part in a round; the codec decides what is sent of it.",
    )
    mask: str = option(
        "rolled",
        "Positions move on, so that after 1/p rounds each took part once (`rolled`), or are "
        "drawn anew in every round (`random`).",
    )
    seed: int = option(0, "Of the positions; the same on every member.")
    weight: str = option(
        "equal",
        "Weight of a member's difference: all the same, or the `tokens` of its batch.",
    )


@dataclass(frozen=True, kw_only=True)
class SignMajority(Method):
    """Options of signSGD with majority vote."""

    name = "sign_majority"
    implementation = "atoll.strategies.outer.sign_majority:SignMajorityOuter"
    pages = "every_step"
    uses_gradients = True
    codecs = CodecSupport(
        why="votes are one sign per number: a codec with state or selection does not apply",
        one_mean=True, memory=False, nearest="sign",
    )  # fmt: skip
    presets = (
        Preset(
            name="signsgd",
            codec="sign",
            options={"momentum": 0.9},
            line="one bit per gradient up, the majority's bit down",
            good_for="per-step training on slow links, and a few hostile members",
            papers=(
                arxiv(
                    "1810.05291",
                    "signSGD with Majority Vote is Communication Efficient And Fault Tolerant",
                    2018,
                ),
            ),
        ),
    )

    momentum: float = option(0.0, "Of every member's own gradients, before the vote (beta).")
    feedback: bool = option(
        False,
        "Send a scale along with the signs, and remember what they lost.",
    )
    weight: str = option(
        "equal",
        "Weight of a member's vote: all the same, or the `tokens` of its batch.",
    )

    @property
    def has_mean(self) -> bool:
        """Whether one mean exists; with scales every vote needs a packet of its own."""
        return not self.feedback


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(Method):
    """Options of 1-bit Adam."""

    name = "onebit_adam"
    implementation = "atoll.strategies.outer.onebit_adam:OneBitAdamOuter"
    pages = "every_step"
    has_mean = False
    later_vectors = 4.0
    uses_gradients = True
    codecs = CodecSupport(why="it applies error feedback itself", memory=False, nearest="sign")
    presets = (
        Preset(
            name="one-bit-adam",
            codec="sign",
            options={"warmup_steps": 1000},
            line="Adam with a frozen variance and one bit of momentum after a warm-up",
            good_for="per-step training that must behave like Adam",
            papers=(
                arxiv(
                    "2102.02888",
                    "1-bit Adam: Communication Efficient Large-Scale Training with Adam's "
                    "Convergence Speed",
                    2021,
                ),
            ),
        ),
    )

    warmup_steps: int = option(
        1000,
        "First steps, of ordinary Adam on uncompressed gradients, at least one; the paper "
        "takes 15 to 25 % of all.",
    )
    floor: float = option(
        0.01,
        "Smallest root of the variance, as a share of its tensor's; 0: none, as in the paper.",
    )
    weight: str = option(
        "tokens",
        "Weight of a member's values: the `tokens` of its batch, or `equal`.",
    )

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse inner optimizers without a variance to freeze after the warm-up."""
        if optimizer not in ("", "adamw", "torch:Adam", "torch:AdamW"):
            raise ConfigError(
                "1-bit Adam freezes the variance of Adam, and this optimizer has none",
                given=f"optimizer = {optimizer!r} in [train]",
                expected='optimizer = "adamw"',
                remedy='optimizer = "adamw", or preset = "signsgd" for any other',
            )


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Method):
    """Options of PowerSGD."""

    name = "powersgd"
    implementation = "atoll.strategies.outer.powersgd:PowerSGDOuter"
    pages = "every_step"
    uses_gradients = True
    codecs = CodecSupport(
        why="it applies error feedback itself, and its factors change basis every round",
        precise_only=True, nearest="int8",
    )  # fmt: skip
    presets = (
        Preset(
            name="powersgd",
            line="gradients of matrices as products of two low-rank factors",
            good_for="per-step training on links where a tenth of the gradients fits",
            papers=(
                arxiv(
                    "1905.13727",
                    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed "
                    "Optimization",
                    2019,
                ),
            ),
        ),
    )

    rank: int = option(4, "Columns of the two factors (r).")
    warmup_steps: int = option(0, "First steps, with whole gradients.")
    seed: int = option(0, "Of the first Q; the same on every member.")
    weight: str = option(
        "tokens",
        "Weight of a member's gradient: the `tokens` of its batch, or `equal`.",
    )
