"""Every preset: its line, its paper, what it is good for."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.strategies.catalogue.entry import Entry, Paper, entry_table

ARXIV = "https://arxiv.org/abs/"


def _arxiv(number: str, title: str, year: int) -> Paper:
    return Paper(title, year, ARXIV + number)


def _entry(
    family: str, name: str, line: str, good_for: str, *papers: Paper, optimizer: str = ""
) -> Entry:
    page = f"docs/methods/{family}/{name}.md"
    return Entry(
        name=name, line=line, good_for=good_for, papers=papers, page=page, optimizer=optimizer
    )


_DILOCO = _arxiv(
    "2311.08105", "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
)
_DP_SGD = _arxiv(
    "1705.09056", "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017
)

METHODS: Mapping[str, Entry] = entry_table(
    [
        _entry(
            "periodic",
            "alone",
            "every member trains its own model and nothing is exchanged",
            "baselines, sweeps with a common data order",
        ),
        _entry(
            "every_step",
            "ddp",
            "the mean of all gradients in every step",
            "fast links; the yardstick for everything below",
            _arxiv(
                "2006.15704",
                "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
                2020,
            ),
            _arxiv(
                "1706.02677", "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017
            ),
        ),
        _entry(
            "periodic",
            "local-sgd",
            "local steps, then the mean of the parameters",
            "a first cut of traffic by H with nothing to tune but H",
            _arxiv("1805.09767", "Local SGD Converges Fast and Communicates Little", 2018),
        ),
        _entry(
            "periodic",
            "post-local-sgd",
            "data parallel at first, Local SGD afterwards",
            "large batches whose generalisation suffers; a safe way into long intervals",
            _arxiv("1808.07217", "Don't Use Large Mini-Batches, Use Local SGD", 2018),
        ),
        _entry(
            "periodic",
            "diloco",
            "hundreds of AdamW steps, then one outer Nesterov step on the mean move",
            "language models over the internet: the first thing to try",
            _DILOCO,
        ),
        _entry(
            "periodic",
            "fedavg",
            "DiLoCo with a plain outer step: the weighted mean of the members' models",
            "members with data of different size and kind",
            _arxiv(
                "1602.05629",
                "Communication-Efficient Learning of Deep Networks from Decentralized Data",
                2016,
            ),
        ),
        _entry(
            "periodic",
            "open-diloco",
            "DiLoCo as in its open reproduction: moves in half precision",
            "links for which fp32 is too much and int8 is not trusted",
            _arxiv(
                "2407.07852",
                "OpenDiLoCo: An Open-Source Framework for Globally Distributed "
                "Low-Communication Training",
                2024,
            ),
        ),
        _entry(
            "periodic",
            "intellect-1",
            "DiLoCo with H = 100 and 8-bit moves in 256 buckets of a few sigmas",
            "large models on a few well-connected sites far apart",
            _arxiv("2412.01152", "INTELLECT-1 Technical Report", 2024),
        ),
        _entry(
            "periodic",
            "muloco",
            "DiLoCo whose inner optimizer is Muon; moves bear 2 to 4 bits",
            "the least bytes per round at DiLoCo's loss",
            _arxiv("2505.23725", "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo", 2025),
            optimizer="muon",
        ),
        _entry(
            "periodic",
            "streaming-diloco",
            "DiLoCo one fragment of the model at a time, sent while training goes on",
            "thin links where a whole model at once would stand in the way",
            _arxiv(
                "2501.18512",
                "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
                2025,
            ),
        ),
        _entry(
            "periodic",
            "eager-diloco",
            "DiLoCo whose rounds take a whole interval: own move fresh, the others' late",
            "links so slow that a round lasts as long as its interval",
            _arxiv(
                "2502.12996",
                "Eager Updates For Overlapped Communication and Computation in DiLoCo",
                2025,
            ),
        ),
        _entry(
            "periodic",
            "slowmo",
            "Local SGD with a slow momentum over the members' mean move",
            "SGD with momentum as the inner optimizer",
            _arxiv(
                "1910.00643",
                "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
                2019,
            ),
        ),
        _entry(
            "gossip",
            "d-psgd",
            "every step mixes the parameters with those of the neighbours in a graph",
            "no place that could add up for all; a ring sends the same for any number of members",
            _DP_SGD,
        ),
        _entry(
            "gossip",
            "one-peer-exponential",
            "gossip with one peer per step, 1, 2, 4, ... places away",
            "gossip that mixes as fast as possible for one model per step",
            _arxiv(
                "2110.13363",
                "Exponential Graph is Provably Efficient for Decentralized Deep Training",
                2021,
            ),
        ),
        _entry(
            "gossip",
            "push-sum",
            "gossip along directed links, with weights that undo the bias",
            "members that can send to others but not hear back in the same step",
            _arxiv("1811.10792", "Stochastic Gradient Push for Distributed Deep Learning", 2018),
        ),
        _entry(
            "gossip",
            "ad-psgd",
            "now and then two members meet in the middle, without waiting for the rest",
            "members of very different speed",
            _arxiv(
                "1710.06952",
                "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
                2017,
            ),
        ),
        _entry(
            "gossip",
            "noloco",
            "DiLoCo in random pairs: no process adds up for all",
            "many members, or links whose delay makes a common round long",
            _arxiv(
                "2506.10911",
                "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
                2025,
            ),
        ),
        _entry(
            "parameter_server",
            "async-diloco",
            "members send their moves whenever they are done; delayed Nesterov on the server",
            "machines of different speed that should never wait",
            _arxiv("2401.09135", "Asynchronous Local-SGD Training for Language Modeling", 2024),
        ),
        _entry(
            "parameter_server",
            "parameter-server",
            "servers apply the mean of every step; with backups the slowest are not waited for",
            "per-step training with a few slow members",
            _arxiv("1604.00981", "Revisiting Distributed Synchronous SGD", 2016),
        ),
        _entry(
            "parameter_server",
            "stale-synchronous",
            "no member gets more than s steps ahead of the slowest",
            "speeds that vary but even out",
            Paper(
                "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
                2013,
                "https://papers.nips.cc/paper/4894",
            ),
        ),
        _entry(
            "parameter_server",
            "async-sgd",
            "servers apply every step as it comes, late ones more gently",
            "a yardstick for asynchronous methods",
            _arxiv("1511.05950", "Staleness-aware Async-SGD for Distributed Deep Learning", 2015),
            _arxiv(
                "1609.08326",
                "Asynchronous Stochastic Gradient Descent with Delay Compensation",
                2016,
            ),
        ),
        _entry(
            "every_step",
            "sparta",
            "in every step a random half per cent of the parameters is averaged",
            "even, tiny traffic; beside DiLoCo it allows longer intervals",
            Paper(
                "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging",
                2025,
                "https://openreview.net/forum?id=stFPf3gzq1",
            ),
        ),
        _entry(
            "every_step",
            "demo",
            "fast-moving DCT components of the momentum, and only their signs move the model",
            "per-step training over the internet without an optimizer state to share",
            _arxiv("2411.19870", "DeMo: Decoupled Momentum Optimization", 2024),
        ),
        _entry(
            "every_step",
            "cocktail-sgd",
            "model differences, random + top-k + few bits both ways, one step late",
            "fine-tuning in every step over hundreds of Mbit/s",
            Paper(
                "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks",
                2023,
                "https://proceedings.mlr.press/v202/wang23t.html",
            ),
        ),
        _entry(
            "every_step",
            "signsgd",
            "one bit per gradient up, the majority's bit down",
            "per-step training on slow links, and a few hostile members",
            _arxiv(
                "1810.05291",
                "signSGD with Majority Vote is Communication Efficient And Fault Tolerant",
                2018,
            ),
        ),
        _entry(
            "every_step",
            "one-bit-adam",
            "Adam with a frozen variance and one bit of momentum after a warm-up",
            "per-step training that must behave like Adam",
            _arxiv(
                "2102.02888",
                "1-bit Adam: Communication Efficient Large-Scale Training with Adam's "
                "Convergence Speed",
                2021,
            ),
        ),
        _entry(
            "every_step",
            "powersgd",
            "gradients of matrices as products of two thin ones",
            "per-step training on links where a tenth of the gradients fits",
            _arxiv(
                "1905.13727",
                "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
                2019,
            ),
        ),
    ]
)
"""Preset -> what it is; in the order in which they are listed."""
