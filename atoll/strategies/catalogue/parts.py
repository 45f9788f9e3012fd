"""Every codec, aggregate, collective and admission rule: its line, its paper, what it is for."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.strategies.catalogue.entry import Entry, Paper, entry_table

ARXIV = "https://arxiv.org/abs/"


def _arxiv(number: str, title: str, year: int) -> Paper:
    return Paper(title, year, ARXIV + number)


def _codec(name: str, line: str, good_for: str, *papers: Paper) -> Entry:
    return Entry(
        name=name, line=line, good_for=good_for, papers=papers, page="docs/reference/codecs.md"
    )


def _aggregate(name: str, line: str, good_for: str, *papers: Paper) -> Entry:
    page = "docs/reference/aggregation.md"
    return Entry(name=name, line=line, good_for=good_for, papers=papers, page=page)


def _collective(name: str, line: str, good_for: str, *papers: Paper) -> Entry:
    page = "docs/reference/collectives.md"
    return Entry(name=name, line=line, good_for=good_for, papers=papers, page=page)


_STREAMING = _arxiv(
    "2501.18512",
    "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
    2025,
)
_LOW_RANK = _arxiv(
    "1905.13727",
    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    2019,
)

CODECS: Mapping[str, Entry] = entry_table(
    [
        _codec("fp32", "every number as it is", "fast links, references"),
        _codec("fp16", "half precision", "half the bytes where values stay within 6e-5 to 65504"),
        _codec("bf16", "the upper half of fp32", "half the bytes, any range, 3 digits"),
        _codec(
            "fp8",
            "8-bit floats (e4m3) with a scale per block",
            "a quarter of the bytes where values of a block differ in size",
            _arxiv("2209.05433", "FP8 Formats for Deep Learning", 2022),
        ),
        _codec(
            "int8",
            "8-bit whole numbers with a scale per block",
            "a quarter of the bytes, nothing lost that training would notice: the usual choice",
            _arxiv("2110.02861", "8-bit Optimizers via Block-wise Quantization", 2021),
        ),
        _codec(
            "sigma8",
            "256 buckets of a few standard deviations; each decodes to the mean of its values",
            "moves that look like a bell curve; sums are kept",
            _arxiv("2412.01152", "INTELLECT-1 Technical Report", 2024),
        ),
        _codec(
            "int4",
            "4-bit whole numbers with a scale per block",
            "an eighth of the bytes, with feedback",
        ),
        _codec(
            "int2",
            "2-bit whole numbers with a scale per block",
            "a sixteenth of the bytes, with feedback, under Muon",
            _arxiv("2505.23725", "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo", 2025),
        ),
        _codec(
            "e3m0",
            "4 bits: sign and a power of two, with a half-precision scale per block",
            "an eighth of the bytes; small values keep their size",
            _STREAMING,
        ),
        _codec(
            "topk",
            "the largest values and where they are",
            "very few bytes, with feedback; members gather",
            _arxiv("1704.05021", "Sparse Communication for Distributed Gradient Descent", 2017),
        ),
        _codec(
            "randomk",
            "values at random places that all members know",
            "very few bytes that still add up on the way; with feedback",
            _arxiv("1809.07599", "Sparsified SGD with Memory", 2018),
        ),
        _codec(
            "lowrank",
            "every matrix as a product of two thin ones",
            "moves of matrices; with feedback",
            _LOW_RANK,
        ),
        _codec(
            "dct",
            "the largest cosine components of every tile",
            "values that vary smoothly across a matrix; with feedback",
            _arxiv("2411.19870", "DeMo: Decoupled Momentum Optimization", 2024),
        ),
        _codec(
            "qsgd",
            "few levels, rounded at random so that the mean is right",
            "proofs, and training without feedback",
            _arxiv(
                "1610.02132",
                "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
                2016,
            ),
        ),
        _codec(
            "sign",
            "one bit per value and a scale",
            "a thirty-second of the bytes, with feedback",
            _arxiv("1802.04434", "signSGD: Compressed Optimisation for Non-Convex Problems", 2018),
        ),
        _codec(
            "feedback",
            "around another: what it lost is added to the next vector",
            "every codec that is coarse",
            _arxiv(
                "1901.09847",
                "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
                2019,
            ),
        ),
        _codec(
            "ef21",
            "around another: only the change since the last vector is sent",
            "coarse codecs of gradients, without a bound on these",
            _arxiv(
                "2106.05203",
                "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback",
                2021,
            ),
        ),
        _codec(
            "by_size",
            "short vectors in one codec, long ones in another",
            "methods that send many small pieces",
        ),
        _codec(
            "by_role",
            "matrices in one codec, tensors of one dimension in another",
            "a coarse codec for what is large, a precise one for biases and norms",
        ),
        _codec(
            "auto",
            "the one that is fastest on the links that were measured",
            "machines with unknown links",
        ),
    ]
)
"""Codec -> what it is."""

AGGREGATES: Mapping[str, Entry] = entry_table(
    [
        _aggregate("mean", "the weighted mean", "members that trust each other"),
        _aggregate("sum", "the weighted sum", "gradients that are meant to be added up"),
        _aggregate(
            "median",
            "the middle value of each coordinate",
            "up to half of the members wrong; coordinates on their own",
            _arxiv(
                "1803.01498",
                "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
                2018,
            ),
        ),
        _aggregate(
            "trimmed",
            "the mean without the F largest and smallest of each coordinate",
            "F members wrong out of more than 2F, at little cost in noise",
            _arxiv(
                "1803.01498",
                "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
                2018,
            ),
        ),
        _aggregate(
            "krum",
            "the one vector that is closest to most others",
            "F members wrong out of 2F + 3 or more, attacks that agree with each other",
            _arxiv("1703.02757", "Byzantine-Tolerant Machine Learning", 2017),
        ),
        _aggregate(
            "multi-krum",
            "the mean of the M vectors that are closest to most others",
            "as krum, with less noise",
            _arxiv("1703.02757", "Byzantine-Tolerant Machine Learning", 2017),
        ),
        _aggregate(
            "clip",
            "a mean in which no vector moves the last aggregate by more than TAU",
            "attacks that grow over time; wants momentum",
            _arxiv("2012.10333", "Learning from History for Byzantine Robust Optimization", 2020),
        ),
        _aggregate(
            "geometric-median",
            "the point with the smallest sum of distances to all",
            "up to half of the members wrong, whatever they send",
            _arxiv("1912.13445", "Robust Aggregation for Federated Learning", 2019),
        ),
    ]
)
"""Rule that makes one vector of the members' -> what it is."""

COLLECTIVES: Mapping[str, Entry] = entry_table(
    [
        _collective("auto", "what suits codec and members", "nearly always"),
        _collective(
            "ring",
            "every member passes its neighbour a part, twice round",
            "large vectors on even links: the least bytes",
            _arxiv(
                "1802.05799", "Horovod: fast and easy distributed deep learning in TensorFlow", 2018
            ),
        ),
        _collective(
            "butterfly",
            "halving, then doubling: partners 1, 2, 4, ... places away",
            "the ring's bytes in few hops; long delays",
        ),
        _collective(
            "tree",
            "sums go up a binary tree, the result comes down",
            "many members and small vectors",
        ),
        _collective(
            "hierarchical",
            "inside sites first, then between one member of each",
            "clusters with fast links inside and slow ones between",
        ),
        _collective("star", "all to one member and back", "few members, one with a fat link"),
    ]
)
"""How a mean travels on the direct route -> what it is."""

ADMISSIONS: Mapping[str, Entry] = entry_table(
    [
        _aggregate("finite", "contributions that are not finite are refused", "always"),
        _aggregate(
            "norms",
            "also those much longer than the others, or than usual",
            "members that may be broken or hostile; warms up over ten rounds",
        ),
    ]
)
"""Filter before the rule -> what it does."""
