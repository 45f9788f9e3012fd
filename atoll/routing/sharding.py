"""Documents -> paths: shards that overlap and are limited in size, and their E and M steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.data.assignment import NO_PATH, Assignment
from atoll.errors import ConfigError, DataError
from atoll.routing.features import Features
from atoll.routing.router import Router, Scores, balanced, clustered, fitted

COPIES = 2
"""Paths that train on each document: overlap keeps small shards from being learned by heart."""

SLACK = 1.25
"""Largest shard, in even shares."""


def first_shards(
    features: Features,
    bounds: NDArray[np.int64],
    modules: Sequence[int],
    *,
    seed: int,
    copies: int = COPIES,
    slack: float = SLACK,
) -> tuple[Router, Assignment]:
    """Return the router of round 0, by clusters, and the shards it makes.

    Args:
        features: Of all documents, ``(documents, width)``.
        bounds: Of `Documents`, ``(documents + 1,)``.
        modules: Modules of each level.
        seed: Of k-means.
        copies: Paths of each document.
        slack: Largest shard, in even shares.

    Raises:
        ConfigError: copies or slack are out of range, or there are more levels than features.
        DataError: there are fewer documents than paths.
    """
    lengths = np.diff(bounds)
    router = balanced(clustered(features, modules, seed=seed), features, lengths, slack=slack)
    return router, assign(router.scores(features), bounds, copies=copies, slack=slack)


def reshard(
    losses: Scores,
    router_features: Features,
    features: Features,
    bounds: NDArray[np.int64],
    *,
    modules: Sequence[int],
    copies: int = COPIES,
    slack: float = SLACK,
) -> tuple[Router, Assignment]:
    """Return a new router and new shards: one E step and one M step.

    The E step labels each text of the router set with the path of smallest loss; the M step fits
    the classifier, balances it on the documents and assigns them again.

    Args:
        losses: Nats per token of every path on every text of the router set, which no path
            trained on, after what its features saw, ``(texts, paths)``.
        router_features: Of these texts, ``(texts, width)``.
        features: Of the documents to be assigned.
        bounds: Of these documents.
        modules: Modules of each level.
        copies: Paths of each document.
        slack: Largest shard, in even shares.

    Raises:
        ConfigError: copies or slack are out of range.
        DataError: a loss is missing or not finite.
    """
    router = fitted(router_features, losses, modules)
    router = balanced(router, features, np.diff(bounds), slack=slack)
    return router, assign(router.scores(features), bounds, copies=copies, slack=slack)


def assign(
    scores: Scores, bounds: NDArray[np.int64], *, copies: int = COPIES, slack: float = SLACK
) -> Assignment:
    """Assign each document to its best paths that have room.

    A path takes first choices up to `slack` even shares of the tokens (or one document, if that is
    longer), and as many second choices again. Documents that lose most without their best path
    choose first. A further copy for which no path has room is left out.

    Args:
        scores: Of every document and path, higher is better, ``(documents, paths)``.
        bounds: Of the documents.
        copies: Paths of each document, at most all.
        slack: At least 1.

    Raises:
        ConfigError: copies or slack are out of range.
        DataError: there are fewer documents than paths.
    """
    documents, paths = scores.shape
    if not 1 <= copies <= paths or slack < 1:
        raise ConfigError(
            "shards cannot be made like that", given=f"copies {copies}, slack {slack}",
            expected=f"1 to {paths} copies, and slack of 1 or more",
        )  # fmt: skip
    if documents < paths:
        raise DataError(
            "there are fewer documents than paths",
            given=f"{documents} documents, {paths} paths",
            expected="at least one document for each path",
            remedy="more text, shorter pieces (--longest) or fewer modules",
        )
    lengths = np.diff(bounds)
    limit = max(slack * float(lengths.sum()) / paths, float(lengths.max()))
    chosen = np.full((documents, copies), NO_PATH, dtype=np.int32)
    for copy in range(copies):
        left = scores.copy()
        used = chosen[:, :copy]
        rows = np.repeat(np.arange(documents), copy)
        left[rows[used.ravel() > NO_PATH], used.ravel()[used.ravel() > NO_PATH]] = -math.inf
        chosen[:, copy] = _choose(left, lengths, limit, must=copy == 0)
    return Assignment(bounds, chosen, paths)


def _choose(
    scores: Scores, lengths: NDArray[np.int64], limit: float, *, must: bool
) -> NDArray[np.int32]:
    """Return one path per document; with `must` even of documents for which none has room."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=1)
    margin = ranked[:, 0] - ranked[:, min(1, scores.shape[1] - 1)]
    room = np.full(scores.shape[1], limit)
    found = np.full(len(scores), NO_PATH, dtype=np.int32)
    for document in np.argsort(-margin, kind="stable"):
        for rank, path in enumerate(order[document]):
            if ranked[document, rank] == -math.inf:
                break
            if room[path] >= lengths[document]:
                found[document] = path
                break
        else:
            if must:
                found[document] = int(room.argmax())
        if found[document] > NO_PATH:
            room[found[document]] -= lengths[document]
    return found


def shard_words(assignment: Assignment, domains: Sequence[str]) -> list[str]:
    """Return a line per path: its documents, tokens and commonest domains."""
    tokens = assignment.tokens()
    lines = []
    for path in range(assignment.num_paths):
        documents = assignment.documents(path)
        names, counts = np.unique([domains[d] for d in documents], return_counts=True)
        top = [
            f"{names[i]} {counts[i] / max(1, len(documents)):.0%}" for i in np.argsort(-counts)[:3]
        ]
        lines.append(
            f"path {path}: {len(documents)} documents, {int(tokens[path])} tokens"
            + (
                f" ({', '.join(top)})"
                if top
                else ": an empty shard, which training refuses: fewer modules"
            )
        )
    return lines
