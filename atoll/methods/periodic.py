"""Methods that combine parameters periodically while training waits."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.methods.method import Method, Preset, arxiv, option


@dataclass(frozen=True, kw_only=True)
class NoSync(Method):
    """Options of training without communication."""

    name = "alone"
    implementation = "atoll.strategies.outer.single:NoSyncOuter"
    pages = "periodic"
    exchanges = False
    has_mean = False
    presets = (
        Preset(
            name="alone",
            line="every member trains its own model and nothing is exchanged",
            good_for="baselines, sweeps with a common data order",
        ),
    )

    every: int = option(
        100,
        "Optimizer steps between two points at which a run can stop or be saved.",
    )


@dataclass(frozen=True, kw_only=True)
class Average(Method):
    """Options of Local SGD."""

    name = "average"
    implementation = "atoll.strategies.outer.average:AverageOuter"
    interval_may_change = True
    per_stage = True
    pages = "periodic"
    presets = (
        Preset(
            name="local-sgd",
            line="local steps, then the mean of the parameters",
            good_for="traffic divided by H, with H as the only option",
            papers=(arxiv("1805.09767", "Local SGD Converges Fast and Communicates Little", 2018),),
        ),
        Preset(
            name="post-local-sgd",
            options={"every_step_until": 500},
            line="data parallel at first, Local SGD afterwards",
            good_for="large batches whose generalisation suffers; a safe way into long intervals",
            papers=(arxiv("1808.07217", "Don't Use Large Mini-Batches, Use Local SGD", 2018),),
        ),
    )

    every: int = option(16, "Optimizer steps between two rounds (H).")
    every_step_until: int = option(
        0,
        "Up to this step members average in every step (post-local SGD); 0: never.",
    )
    growing: bool = option(
        False,
        "Reach `every` by doubling: the first rounds are 1, 2, 4, ... steps apart.",
    )
    weight: str = option(
        "tokens",
        "Weight of a member's values: `tokens` trained since the last round, `equal`, or "
        "`fednova`: equal, and as if all had taken the same number of steps.",
    )


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Method):
    """Options of DiLoCo."""

    name = "diloco"
    implementation = "atoll.strategies.outer.diloco:DiLoCoOuter"
    interval_may_change = True
    per_stage = True
    pages = "periodic"
    presets = (
        # Measured on a small model and 2,000 steps (docs/measured/tuning.md): as good as data
        # parallel with 219 times fewer bytes. Larger models need a longer interval.
        Preset(
            name="diloco",
            codec="feedback(int8)",
            by_rounds=True,
            options={"every": 35, "shared_steps": 170, "outer_lr": 0.8, "outer_momentum": 0.75},
            line="hundreds of AdamW steps, then one outer Nesterov step on the mean update",
            good_for="language models over the internet: the first thing to try",
            papers=(
                arxiv(
                    "2311.08105",
                    "DiLoCo: Distributed Low-Communication Training of Language Models",
                    2023,
                ),
            ),
        ),
        Preset(
            name="fedavg",
            options={"every": 100, "outer_optimizer": "sgd", "outer_lr": 1.0},
            line="DiLoCo with a plain outer step: the weighted mean of the members' models",
            good_for="members with data of different size and kind",
            papers=(
                arxiv(
                    "1602.05629",
                    "Communication-Efficient Learning of Deep Networks from Decentralized Data",
                    2016,
                ),
            ),
        ),
        Preset(
            name="open-diloco",
            codec="fp16",
            line="DiLoCo as in its open reproduction: half-precision pseudo-gradients",
            good_for="links too slow for fp32, where int8 is not wanted",
            papers=(
                arxiv(
                    "2407.07852",
                    "OpenDiLoCo: An Open-Source Framework for Globally Distributed "
                    "Low-Communication Training",
                    2024,
                ),
            ),
        ),
        Preset(
            name="intellect-1",
            codec="sigma8",
            options={"every": 100},
            line="DiLoCo with H = 100 and pseudo-gradients in 256 buckets of a few sigmas",
            good_for="large models on a few well-connected sites far apart",
            papers=(arxiv("2412.01152", "INTELLECT-1 Technical Report", 2024),),
        ),
        Preset(
            name="muloco",
            codec="feedback(int2)",
            options={"every": 30},
            optimizer="muon",
            loss="4 % worse to 12 % better than `diloco`; images: 6 to 46 % worse",
            line="DiLoCo with Muon inside; pseudo-gradients tolerate 2 to 4 bits",
            good_for="the least bytes per round at DiLoCo's loss",
            papers=(
                arxiv("2505.23725", "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo", 2025),
            ),
        ),
        Preset(
            name="sparseloco",
            # Chosen on a small model and 240 steps, where the paper's 1 of 64 every 30 steps is
            # 16 % worse than DiLoCo (docs/measured/benchmarks.md).
            codec="feedback:0.95(topk:0.0625:4096|mean2)",
            options={"every": 10, "outer_optimizer": "sgd", "outer_lr": 1.0},
            loss="5 to 24 % better than `diloco` in short runs, worse in long ones; images: "
            "8 % better to 15 % worse",
            line="DiLoCo that sends 1 of 16 values in 2 bits; fading feedback for momentum",
            good_for="uploads slower than downloads: 64 times fewer bytes a round than fp32",
            papers=(
                arxiv(
                    "2508.15706",
                    "Communication Efficient LLM Pre-training with SparseLoCo",
                    2025,
                ),
            ),
        ),
        Preset(
            name="dipaco",
            inner="paths",
            codec="feedback(int8)",
            options={"every": 150},
            line="paths of shared modules, each trained on its own documents; DiLoCo per module",
            good_for="a model larger than any machine, of paths that each fit on one",
            papers=(arxiv("2403.10616", "DiPaCo: Distributed Path Composition", 2024),),
        ),
    )

    every: int = option(500, "Optimizer steps between two rounds (H).")
    outer_lr: float = option(0.7, "Learning rate of the outer optimizer.")
    outer_momentum: float = option(
        0.9,
        "Momentum of the outer optimizer; of `adam` its first beta.",
    )
    outer_optimizer: str = option(
        "",
        "`nesterov`, `momentum` (heavy ball), `sgd` (without momentum), `adam`, or any of "
        "torch.optim, e.g. `torch:NAdam`; empty: `nesterov`, or `sgd` where the momentum is 0.",
    )
    outer_options: str = option(
        "",
        "Further arguments of an outer optimizer of torch.optim: `betas=(0.9, 0.99), eps=0.1`.",
    )
    outer_eps: float = option(0.1, "Epsilon of `adam`.")
    drop: float = option(
        0.0,
        "Probability with which a member's update is lost; it continues from its own parameters.",
    )
    drop_seed: int = option(0, "Seed of the choice of lost updates.")
    prune: float = option(
        0.0,
        "Share of every neuron's values that is set to zero before an update is sent.",
    )
    shared_steps: int = option(
        0,
        "First steps that every member computes on the same data, so that they need no traffic "
        "(built-in trainer only).",
    )
    warmup_steps: int = option(
        0,
        "Steps after those in which members average plainly, every `warmup_every` steps.",
    )
    warmup_every: int = option(8, "Steps between two rounds of the warm-up.")
    weight: str = option(
        "tokens",
        "Weight of a member's values: `tokens` trained since the last round, `equal`, or "
        "`fednova`: equal, and as if all had taken the same number of steps.",
    )

    @property
    def later_vectors(self) -> float:
        """State of the outer optimizer: momentum, two moments of `adam`, or nothing.

        Those of torch.optim count as two: most have two or fewer.
        """
        if self.outer_optimizer.startswith("torch:"):
            return 2.0
        return {"adam": 2.0, "sgd": 0.0}.get(self.outer_optimizer, float(self.outer_momentum > 0))


@dataclass(frozen=True, kw_only=True)
class SlowMo(Method):
    """Options of SlowMo."""

    name = "slowmo"
    implementation = "atoll.strategies.outer.slowmo:SlowMoOuter"
    pages = "periodic"
    later_vectors = 1.0
    presets = (
        Preset(
            name="slowmo",
            line="Local SGD with a slow momentum over the members' mean update",
            good_for="SGD with momentum as the inner optimizer",
            papers=(
                arxiv(
                    "1910.00643",
                    "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
                    2019,
                ),
            ),
        ),
    )

    every: int = option(16, "Optimizer steps between two rounds (H).")
    slow_lr: float = option(1.0, "Slow rate (alpha).")
    slow_momentum: float = option(0.7, "Slow momentum (beta).")
    rate: float = option(
        0.0,
        "Inner rate (gamma), where it is constant; 0: that of the inner optimizer.",
    )
    weight: str = option(
        "tokens",
        "Weight of a member's values: `tokens` trained since the last round, `equal`, or "
        "`fednova`: equal, and as if all had taken the same number of steps.",
    )
