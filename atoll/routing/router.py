"""A router: features of a text -> a score for every path.

Every router here is one linear map, so they are stored, loaded and balanced alike. The nearest
centroid is one: ``-|x - c|^2 = 2 x c - |c|^2 - |x|^2``, and the last term is the same for all. So
is product k-means, whose distances add up over the levels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.nn import functional

from atoll.errors import DataError
from atoll.routing.clusters import Points, k_means, product_k_means
from atoll.routing.features import PREFIX, Features

Scores = NDArray[np.float64]
Labels = NDArray[np.int64]

MOST_CLUSTERED = 64
"""Paths up to which `kmeans` clusters whole features; more are clustered level by level."""

FIT_STEPS = 100
FOLDS = 4
DECAYS = (1e-3, 1e-2, 1e-1)
"""Penalties on squared weights that are tried, of features with deviation 1."""

BALANCE_STEPS = 400
_FORMAT = "atoll-router-1"


@dataclass(frozen=True, eq=False)
class Router:
    """Scores of paths, linear in the features.

    Attributes:
        modules: Modules of each level. Paths are numbered with the last level fastest: path
            ``k0 * modules[1] + k1`` of two levels has module `k0` of level 0 and `k1` of level 1.
        weight: float64 ``(paths, width)``.
        bias: float64 ``(paths,)``.
        prefix: First tokens of a document that choose its path.
        tokenizer: JSON of the documents' tokenizer; empty: not known.
    """

    modules: tuple[int, ...]
    weight: Points
    bias: Scores
    prefix: int = PREFIX
    tokenizer: str = ""

    @property
    def num_paths(self) -> int:
        """Number of paths, the product of `modules`."""
        return math.prod(self.modules)

    def scores(self, features: Features) -> Scores:
        """Return scores, higher is better, float64 ``(texts, paths)``; raises DataError."""
        if features.ndim != 2 or features.shape[1] != self.weight.shape[1]:
            raise DataError(
                "these features are not those of the router", given=f"shape {features.shape}",
                expected=f"(texts, {self.weight.shape[1]}), of the model it was made with",
            )  # fmt: skip
        found: Scores = features.astype(np.float64) @ self.weight.T + self.bias
        return found

    def choose(self, features: Features) -> Labels:
        """Return the best path of each text, int64 ``(texts,)``."""
        best: Labels = self.scores(features).argmax(axis=1)
        return best

    def write(self, file: Path) -> None:
        """Write `router.safetensors`."""
        about = {
            "format": _FORMAT, "modules": json.dumps(self.modules), "prefix": str(self.prefix),
            "tokenizer": self.tokenizer,
        }  # fmt: skip
        save_file({"weight": self.weight, "bias": self.bias}, file, metadata=about)


def read_router(file: Path) -> Router:
    """Read a file of :meth:`Router.write`; raises DataError."""
    try:
        with safe_open(file, framework="numpy") as opened:
            about = dict(opened.metadata() or {})
            weight, bias = opened.get_tensor("weight"), opened.get_tensor("bias")
        if about["format"] != _FORMAT:
            raise KeyError("format")
        modules = tuple(int(count) for count in json.loads(about["modules"]))
        prefix, tokenizer = int(about["prefix"]), about["tokenizer"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError("a router cannot be read", given=str(file)) from error
    if weight.shape[0] != math.prod(modules) or bias.shape != weight.shape[:1]:
        raise DataError(
            "a router does not fit its modules", given=f"{file}: {weight.shape}, modules {modules}"
        )
    return Router(modules, weight, bias, prefix, tokenizer)


def clustered(features: Features, modules: Sequence[int], *, seed: int) -> Router:
    """Return the first router: nearest centroid, of whole features or level by level.

    Features are brought to mean 0 and deviation 1 first, which the router's weights include.

    Raises:
        ConfigError: there are more levels than features.
        DataError: there are fewer documents than paths.
    """
    modules = tuple(modules)
    points, mean, scale = _standard(features)
    if math.prod(modules) <= MOST_CLUSTERED:
        centroids = k_means(points, math.prod(modules), seed=seed)
    else:
        levels = product_k_means(points, modules, seed=seed)
        grid = np.unravel_index(np.arange(math.prod(modules)), modules)
        centroids = np.concatenate(
            [level[chosen] for level, chosen in zip(levels, grid, strict=True)], axis=1
        )
    bias = -(centroids**2).sum(axis=1)
    return _folded(modules, 2.0 * centroids, bias, mean, scale)


def fitted(features: Features, losses: Scores, modules: Sequence[int]) -> Router:
    """Return the discriminative router: a logistic classifier of the best path.

    The label of a text is the path with the smallest loss, its weight in the fit how much is lost
    with an average path instead: where paths are alike, a wrong choice costs nothing. The penalty
    on the weights is the one of `DECAYS` whose choices lose least on texts that were left out of
    the fit: a router set is small.

    Args:
        features: Of the router set, ``(texts, width)``.
        losses: Of every path on every text, **after** what the features saw, nats
            ``(texts, paths)``.
        modules: Modules of each level.

    Raises:
        DataError: shapes differ, or a loss is not finite.
    """
    modules = tuple(modules)
    if losses.shape != (len(features), math.prod(modules)) or not np.isfinite(losses).all():
        raise DataError(
            "the losses on the router set are not complete",
            given=f"losses {losses.shape}, features {features.shape}",
            expected=f"finite numbers, ({len(features)}, {math.prod(modules)})",
        )
    decay = min(DECAYS, key=lambda tried: _left_out_loss(features, losses, modules, tried))
    return _fit(features, losses, modules, decay)


def _left_out_loss(
    features: Features, losses: Scores, modules: tuple[int, ...], decay: float
) -> float:
    """Return the mean loss of the chosen paths, each text by a router that has not seen it."""
    if len(features) < 2 * FOLDS:
        return -decay  # too few to tell: the strongest penalty
    fold = np.arange(len(features)) % FOLDS
    total = 0.0
    for one in range(FOLDS):
        out = fold == one
        chosen = _fit(features[~out], losses[~out], modules, decay).choose(features[out])
        total += float(losses[out][np.arange(len(chosen)), chosen].sum())
    return total / len(features)


def _fit(features: Features, losses: Scores, modules: tuple[int, ...], decay: float) -> Router:
    points, mean, scale = _standard(features)
    gain = losses.mean(axis=1) - losses.min(axis=1)
    share = gain / gain.sum() if gain.sum() > 0 else np.full(len(gain), 1.0 / len(gain))
    x, y = torch.from_numpy(points), torch.from_numpy(losses.argmin(axis=1))
    weights = torch.from_numpy(share)
    linear = torch.zeros(math.prod(modules), points.shape[1] + 1, dtype=torch.float64)
    linear.requires_grad_()
    optimizer = torch.optim.LBFGS([linear], max_iter=FIT_STEPS, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        each = functional.cross_entropy(x @ linear[:, :-1].T + linear[:, -1], y, reduction="none")
        total = (each * weights).sum() + decay * (linear[:, :-1] ** 2).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = linear.detach().numpy()
    return _folded(modules, found[:, :-1], found[:, -1], mean, scale)


def balanced(
    router: Router, features: Features, tokens: NDArray[np.int64], *, slack: float = 1.25
) -> Router:
    """Return the router with a bias per path, so that no path gets too many tokens.

    A path with more than its share becomes less attractive, one with less more so, in smaller and
    smaller steps, until the largest has at most `slack` times its share. Where that cannot be
    reached, as with documents that all look the same, the most even bias that was seen is kept;
    the limit of `assign` then decides.

    Args:
        router: Any router.
        features: Of the documents to be balanced, ``(documents, width)``.
        tokens: Tokens of each of them.
        slack: Largest share of a path, in even shares.
    """
    scores = router.scores(features)
    spread = float(scores.std(axis=1).mean()) or 1.0
    bias, best, least = np.zeros(router.num_paths), np.zeros(router.num_paths), math.inf
    for step in range(BALANCE_STEPS):
        chosen = (scores + bias).argmax(axis=1)
        share = np.bincount(chosen, weights=tokens, minlength=router.num_paths)
        share = share / tokens.sum() * router.num_paths
        if share.max() < least:
            best, least = bias.copy(), float(share.max())
        if least <= slack:
            break
        bias -= spread * (1.0 - step / BALANCE_STEPS) * 0.2 * (share - 1.0).clip(-1.0, 1.0)
    return replace(router, bias=router.bias + best - best.mean())


def _standard(features: Features) -> tuple[Points, Points, Points]:
    """Return features with mean 0 and deviation 1, and both; constant features become 0."""
    points = features.astype(np.float64)
    mean, scale = points.mean(axis=0), points.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    return (points - mean) / scale, mean, scale


def _folded(
    modules: tuple[int, ...], weight: Points, bias: Scores, mean: Points, scale: Points
) -> Router:
    """Return the router of raw features that equals one of standard features."""
    scaled = weight / scale
    return Router(modules, np.ascontiguousarray(scaled), bias - scaled @ mean)
