"""Aggregation rules, collectives and filters that a job file can name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.methods.method import Paper, arxiv


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Description of a name in a job file."""

    name: str
    """Without parameters."""
    line: str
    good_for: str
    papers: tuple[Paper, ...] = ()
    """The method's own first."""
    page: str
    """Path relative to the project's root."""


def _aggregate(name: str, line: str, good_for: str, *papers: Paper) -> Entry:
    page = "docs/reference/aggregation.md"
    return Entry(name=name, line=line, good_for=good_for, papers=papers, page=page)


def _collective(name: str, line: str, good_for: str, *papers: Paper) -> Entry:
    page = "docs/reference/collectives.md"
    return Entry(name=name, line=line, good_for=good_for, papers=papers, page=page)


def _table(entries: Iterable[Entry]) -> Mapping[str, Entry]:
    return MappingProxyType({entry.name: entry for entry in entries})


AGGREGATES: Mapping[str, Entry] = _table(
    [
        _aggregate("mean", "the weighted mean", "members that trust each other"),
        _aggregate("sum", "the weighted sum", "gradients that are meant to be added up"),
        _aggregate(
            "median",
            "the median of each coordinate",
            "up to half of the members wrong; coordinates are independent",
            arxiv(
                "1803.01498",
                "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
                2018,
            ),
        ),
        _aggregate(
            "trimmed",
            "the mean without the F largest and smallest of each coordinate",
            "F members wrong out of more than 2F, at little cost in noise",
            arxiv(
                "1803.01498",
                "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
                2018,
            ),
        ),
        _aggregate(
            "krum",
            "the one vector that is closest to most others",
            "F members wrong out of 2F + 3 or more, attacks that agree with each other",
            arxiv("1703.02757", "Byzantine-Tolerant Machine Learning", 2017),
        ),
        _aggregate(
            "multi-krum",
            "the mean of the M vectors that are closest to most others",
            "as krum, with less noise",
            arxiv("1703.02757", "Byzantine-Tolerant Machine Learning", 2017),
        ),
        _aggregate(
            "clip",
            "a mean in which no vector moves the last aggregate by more than TAU",
            "attacks that grow over time; needs momentum",
            arxiv("2012.10333", "Learning from History for Byzantine Robust Optimization", 2020),
        ),
        _aggregate(
            "geometric-median",
            "the point with the smallest sum of distances to all",
            "up to half of the members wrong, whatever they send",
            arxiv("1912.13445", "Robust Aggregation for Federated Learning", 2019),
        ),
    ]
)

COLLECTIVES: Mapping[str, Entry] = _table(
    [
        _collective("auto", "chosen by codec and members", "nearly always"),
        _collective(
            "ring",
            "members pass parts around the ring twice",
            "large vectors on even links: the least bytes",
            arxiv(
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
        _collective("star", "all to one member and back", "few members, one with a fast link"),
    ]
)
"""Collectives of the direct route."""

ADMISSIONS: Mapping[str, Entry] = _table(
    [
        _aggregate("finite", "contributions that are not finite are refused", "always"),
        _aggregate(
            "norms",
            "also those much longer than the others, or than usual",
            "members that may be broken or hostile; warms up over ten rounds",
        ),
    ]
)
