"""Losses of paths on documents, routed once or again every few tokens (arXiv 2403.10616).

    prefix   the first tokens of a document, which choose its path and are never scored
    chunk    consecutive tokens that are scored with one path

The path of a chunk is chosen from text **before** the chunk: `text_before` is the only place that
reads documents for a router. Routing once and routing again score the same chunks with the same
context, so they differ in the choice of paths only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from atoll.data import Documents, Tokenizer
from atoll.errors import ConfigError, DataError
from atoll.models.language import LanguageModel, evaluating
from atoll.routing.features import FeatureModel, Features
from atoll.routing.router import Labels, Router, Scores

EVERY = 64
"""Tokens of a chunk, as in the paper."""

BATCH = 64

LoadPath = Callable[[int], LanguageModel]
"""Returns the model of a path, by its number."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Chunks of documents, in order, each ``[start, stop)`` tokens of its document.

    Attributes:
        document: int64 ``(chunks,)``.
        start: At least the prefix, int64 ``(chunks,)``.
        stop: int64 ``(chunks,)``.
        unscored: Documents without a chunk: not longer than the prefix.
    """

    document: Labels
    start: Labels
    stop: Labels
    unscored: int

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.document)

    @property
    def tokens(self) -> Labels:
        """Scored tokens of each chunk."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class RoutedLoss:
    """What a set of paths loses on some documents.

    Attributes:
        loss: Nats per scored token.
        tokens: Scored tokens.
        chosen: The path of each chunk, int64 ``(chunks,)``.
        unscored: Documents that are not longer than the prefix.
    """

    loss: float
    tokens: int
    chosen: Labels
    unscored: int


def chunks_of(documents: Documents, *, prefix: int, every: int = EVERY) -> Chunks:
    """Return all chunks after the prefix; the last one of a document may be shorter.

    Raises:
        DataError: no document is longer than the prefix.
    """
    rows = [
        (number, start, min(start + every, int(length)))
        for number, length in enumerate(documents.lengths)
        for start in range(prefix, int(length), every)
    ]
    if not rows:
        raise DataError(
            "no document has a token to score", given=f"{len(documents)} documents",
            expected=f"one that is longer than the prefix of {prefix} tokens",
        )  # fmt: skip
    table = np.array(rows, dtype=np.int64)
    unscored = int((documents.lengths <= prefix).sum())
    return Chunks(table[:, 0], table[:, 1], table[:, 2], unscored)


def text_before(documents: Documents, document: int, start: int, longest: int) -> Tensor:
    """Return at most `longest` tokens of a document that end before token `start`."""
    return documents.ids(document)[max(0, start - longest) : start]


def chunk_features(
    reader: FeatureModel, documents: Documents, chunks: Chunks, tokenizer: Tokenizer, *, again: bool
) -> Features:
    """Return what the router may know of each chunk, float32 ``(chunks, width)``.

    Args:
        reader: The small model.
        documents: Those of the chunks.
        chunks: What is to be scored.
        tokenizer: Of the documents.
        again: The text right before the chunk, as much as `reader` can read; otherwise the
            document's prefix.
    """
    if not again:
        first = np.unique(chunks.document)
        found = reader.prefixes(documents, first.tolist(), tokenizer)
        return found[np.searchsorted(first, chunks.document)]
    texts = [
        text_before(documents, int(document), int(start), reader.longest)
        for document, start in zip(chunks.document, chunks.start, strict=True)
    ]
    return reader.features(texts, tokenizer)


@torch.no_grad()
def chunk_losses(
    model: LanguageModel, documents: Documents, chunks: Chunks, *, batch: int = BATCH
) -> Scores:
    """Return the summed loss of each chunk in nats, float64 ``(chunks,)``.

    A chunk is scored with as much text before it as fits in the model's context.

    Raises:
        ConfigError: a chunk is longer than the model's context.
    """
    context = model.config.context
    if len(chunks) and int(chunks.tokens.max()) > context:
        raise ConfigError(
            "chunks do not fit the model", given=f"{int(chunks.tokens.max())} tokens",
            expected=f"at most {context}, its context",
        )  # fmt: skip
    device = next(model.parameters()).device
    found = np.zeros(len(chunks))
    for begin in range(0, len(chunks), batch):
        rows = range(begin, min(begin + batch, len(chunks)))
        inputs, targets = _windows(documents, chunks, rows, context)
        with evaluating(model):
            logits = model(inputs.to(device)).float()
        each = functional.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), reduction="none", ignore_index=-1
        )
        found[begin : begin + len(rows)] = each.view(targets.shape).double().sum(1).cpu().numpy()
    return found


def _windows(
    documents: Documents, chunks: Chunks, rows: range, context: int
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets ``(rows, length)``; targets that are not scored are -1."""
    texts = []
    for row in rows:
        start, stop = int(chunks.start[row]), int(chunks.stop[row])
        ids = documents.ids(int(chunks.document[row]))[max(0, stop - 1 - context) : stop]
        texts.append((ids, stop - start))
    longest = max(len(ids) for ids, _ in texts) - 1
    inputs = torch.zeros(len(texts), longest, dtype=torch.int64)
    targets = torch.full((len(texts), longest), -1)
    for row, (ids, scored) in enumerate(texts):
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(ids) - 1 - scored : len(ids) - 1] = ids[-scored:]
    return inputs, targets


def path_losses(load: LoadPath, paths: int, documents: Documents, chunks: Chunks) -> Scores:
    """Return the loss of every path on every chunk, nats per token ``(chunks, paths)``.

    With :func:`chunk_features` of the same chunks this is what `fitted` and `reshard` learn from.
    """
    each = [chunk_losses(load(path), documents, chunks) for path in range(paths)]
    return np.stack(each, axis=1) / chunks.tokens[:, None]


def per_document(losses: Scores, chunks: Chunks) -> Scores:
    """Return losses per token of whole documents, from those of their chunks.

    Returns:
        One row for each document with a chunk, in order, ``(scored documents, paths)``.
    """
    _, row = np.unique(chunks.document, return_inverse=True)
    total = np.zeros((int(row.max()) + 1, losses.shape[1]))
    np.add.at(total, row, losses * chunks.tokens[:, None])
    return total / np.bincount(row, weights=chunks.tokens)[:, None]


def routed_loss(
    load: LoadPath,
    router: Router,
    reader: FeatureModel,
    documents: Documents,
    tokenizer: Tokenizer,
    *,
    every: int | None = None,
    chunk: int = EVERY,
) -> RoutedLoss:
    """Return the loss of a set of paths on documents; each path is loaded at most once.

    Args:
        load: Returns the model of a path.
        router: Chooses paths.
        reader: Gives the router its features.
        documents: What to score.
        tokenizer: Of the documents and the paths.
        every: Tokens after which a path is chosen again from the text so far; None: once, from
            the prefix.
        chunk: Tokens that are scored together when routed once; does not matter otherwise.

    Raises:
        ConfigError: chunks do not fit the models.
        DataError: no document is longer than the prefix.
    """
    chunks = chunks_of(documents, prefix=reader.prefix, every=every or chunk)
    features = chunk_features(reader, documents, chunks, tokenizer, again=every is not None)
    chosen = router.choose(features)
    total = 0.0
    for path in np.unique(chosen):
        own = np.flatnonzero(chosen == path)
        total += float(chunk_losses(load(int(path)), documents, _some(chunks, own)).sum())
    tokens = int(chunks.tokens.sum())
    return RoutedLoss(total / tokens, tokens, chosen, chunks.unscored)


def _some(chunks: Chunks, rows: NDArray[np.int64]) -> Chunks:
    return Chunks(chunks.document[rows], chunks.start[rows], chunks.stop[rows], chunks.unscored)
