"""Documents of a corpus as ranges of a dataset's tokens.

The held-out split removes blocks of bytes and the tokenizer joins bytes, so a document's place in
the tokens follows from its place in the text, the blocks that were held out, and the bytes of each
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.corpora import Corpus, load_corpus
from atoll.data.dataset import Dataset
from atoll.data.split import HELD_OUT_CAP_BYTES, Blocks, Split, split_text
from atoll.data.tokens import Tokenizer
from atoll.errors import ConfigError, DataError

Offsets = NDArray[np.int64]

LONGEST_PIECE = 1024
"""Tokens of a piece unless the caller says otherwise: the length of a sequence in DiPaCo."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Texts, or pieces of long ones, as ranges of tokens; together they cover all the tokens.

    Attributes:
        tokens: 1-D ids.
        bounds: int64 ``(documents + 1,)``; document `d` is ``tokens[bounds[d] : bounds[d + 1]]``,
            never empty.
        source: The text of the corpus of which each document is a piece, int64 ``(documents,)``.
        names: The name of every text of the corpus.
        domains: The domain of every text of the corpus.
        left_out: Texts without a token here: empty, or wholly in the other part of the split.
    """

    tokens: Tensor
    bounds: Offsets
    source: Offsets
    names: tuple[str, ...]
    domains: tuple[str, ...]
    left_out: int

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.source)

    @property
    def lengths(self) -> Offsets:
        """Tokens of each document, all positive, int64 ``(documents,)``."""
        return np.diff(self.bounds)

    def ids(self, document: int) -> Tensor:
        """Return one document, int64 ``(tokens,)``."""
        start, stop = self.bounds[document], self.bounds[document + 1]
        return self.tokens[start:stop].long()

    def domain(self, document: int) -> str:
        """Return the domain of a document's text."""
        return self.domains[int(self.source[document])]

    def chosen(self, documents: Sequence[int] | Offsets) -> Iterator[Tensor]:
        """Yield some documents in the given order."""
        return (self.ids(int(document)) for document in documents)


def train_documents(
    dataset: Dataset,
    *,
    seed: int,
    held_out: float = 0.05,
    held_out_cap_bytes: int = HELD_OUT_CAP_BYTES,
    longest: int = LONGEST_PIECE,
) -> Documents:
    """Return the documents of ``dataset.train``; the arguments MUST be those of `load_dataset`.

    Texts longer than `longest` tokens are cut into pieces of almost equal length. Where a block in
    the middle of a text is held out, the parts around it are one document.

    Raises:
        ConfigError: `longest` is below 2.
        DataError: the corpus has changed since, or the tokenizer does not keep every byte.
    """
    corpus = load_corpus(dataset.corpus)
    split = split_text(corpus.text, share=held_out, seed=seed, cap_bytes=held_out_cap_bytes)
    edges = train_edges(_sizes(corpus), split)
    return _documents(corpus, edges, dataset.train, dataset.tokenizer, len(split.train), longest)


def held_out_documents(
    dataset: Dataset,
    *,
    seed: int,
    held_out: float = 0.05,
    held_out_cap_bytes: int = HELD_OUT_CAP_BYTES,
    longest: int = LONGEST_PIECE,
) -> Documents:
    """Return the documents of ``dataset.held_out``: each is from one block of one text.

    Arguments and errors are those of :func:`train_documents`.
    """
    corpus = load_corpus(dataset.corpus)
    split = split_text(corpus.text, share=held_out, seed=seed, cap_bytes=held_out_cap_bytes)
    blocks = np.asarray(split.held_out_blocks, dtype=np.int64) * split.block_bytes
    texts = _edges(_sizes(corpus))
    edges = np.union1d(texts, np.concatenate((blocks, blocks + split.block_bytes)))
    text_of = np.searchsorted(texts, edges, side="right") - 1
    return _documents(
        corpus, _removed_before(edges, split, keep_held_out=True), dataset.held_out.tokens,
        dataset.tokenizer, len(split.held_out), longest, texts=text_of[:-1],
    )  # fmt: skip


def all_documents(spec: str, tokenizer: Tokenizer, *, longest: int = LONGEST_PIECE) -> Documents:
    """Return all texts of a corpus as documents, none of it held out, each encoded by itself.

    Raises:
        ConfigError: `longest` is below 2.
        DataError: nothing matches, everything is empty, or a file cannot be read.
    """
    corpus = load_corpus(spec)
    texts = [tokenizer.encode(document.data) for document in corpus.documents]
    lengths = np.array([len(ids) for ids in texts], dtype=np.int64)
    keep = np.flatnonzero(lengths)
    stops = lengths[keep].cumsum()
    bounds, source = _cut(stops - lengths[keep], stops, keep, _checked(longest))
    names = tuple(document.name for document in corpus.documents)
    domains = tuple(document.domain for document in corpus.documents)
    return Documents(torch.cat(texts), bounds, source, names, domains, len(texts) - len(keep))


def _checked(longest: int) -> int:
    if longest < 2:
        raise ConfigError(
            "pieces of documents are too short", given=longest, expected="2 tokens or more"
        )
    return longest


def _sizes(corpus: Corpus) -> Offsets:
    return np.array([len(document.data) for document in corpus.documents], dtype=np.int64)


def _edges(sizes: Offsets) -> Offsets:
    """Return where each text begins in `Corpus.text`, and its end, int64 ``(texts + 1,)``.

    The line break between two texts belongs to the first.
    """
    edges = np.concatenate((np.zeros(1, dtype=np.int64), (sizes + 1).cumsum()))
    edges[-1] -= 1
    return edges


def train_edges(sizes: Offsets, split: Split | Blocks) -> Offsets:
    """Return where texts of these sizes begin in the training text, and its end."""
    return _removed_before(_edges(sizes), split, keep_held_out=False)


def _removed_before(edges: Offsets, split: Split | Blocks, *, keep_held_out: bool) -> Offsets:
    """Return offsets in the whole text as offsets in one part of the split."""
    starts = np.asarray(split.held_out_blocks, dtype=np.int64) * split.block_bytes
    number = np.searchsorted(starts, edges, side="left")
    before = number * split.block_bytes
    last = starts[np.maximum(number - 1, 0)]
    overshoot = np.where(number > 0, np.maximum(last + split.block_bytes - edges, 0), 0)
    inside: Offsets = before - overshoot
    return inside if keep_held_out else edges - inside


def _documents(
    corpus: Corpus,
    edges: Offsets,
    tokens: Tensor,
    tokenizer: Tokenizer,
    num_bytes: int,
    longest: int,
    *,
    texts: Offsets | None = None,
) -> Documents:
    """Return the documents between byte offsets; `texts` says of which text each range is."""
    ends = token_ends(tokens, tokenizer)
    if (int(ends[-1]) if len(ends) else 0) != num_bytes:
        raise DataError(
            "documents cannot be found in these tokens",
            given=f"{num_bytes} bytes of {corpus.name}, tokens of {int(ends[-1:].sum())} bytes",
            expected="as many: the same files, split and tokenizer, and one that keeps every byte",
            remedy='tokenizer = "bytes" or "bpe:SIZE" in [data]',
        )
    # A token that begins in one text and ends in the next belongs to the first.
    at = np.searchsorted(np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1])), edges)
    names = tuple(document.name for document in corpus.documents)
    domains = tuple(document.domain for document in corpus.documents)
    return documents_at(at, tokens, Texts(names, domains, _sizes(corpus)), longest, of=texts)


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """What is known of the texts of a corpus without reading them: sizes are in bytes."""

    names: tuple[str, ...]
    domains: tuple[str, ...]
    sizes: Offsets


def documents_at(
    at: Offsets, tokens: Tensor, texts: Texts, longest: int, *, of: Offsets | None = None
) -> Documents:
    """Return the documents between tokens `at`; raises ConfigError.

    Range `r` is of the text ``of[r]``; None: of text `r`.
    """
    _checked(longest)
    of = np.arange(len(at) - 1) if of is None else of
    lengths = np.diff(at)
    only_break = (texts.sizes == 0)[of]
    merged = only_break & (lengths <= 1)  # the line break after an empty text joins the one before
    keep = np.flatnonzero((lengths > 0) & ~merged)
    starts = at[:-1][keep]
    stops = np.append(starts[1:], at[-1])
    bounds, source = _cut(starts, stops, of[keep], longest)
    gone = len(texts.names) - len(np.unique(source))
    return Documents(tokens, bounds, source, texts.names, texts.domains, gone)


def _cut(starts: Offsets, stops: Offsets, source: Offsets, longest: int) -> tuple[Offsets, Offsets]:
    """Cut ranges that follow each other into pieces of at most `longest`, almost equally long."""
    pieces = -(-(stops - starts) // longest)
    bounds = [
        starts[d] + np.arange(count) * (stops[d] - starts[d]) // count
        for d, count in enumerate(pieces)
    ]
    end = stops[-1:]
    flat = np.concatenate([*bounds, end]) if bounds else np.zeros(1, dtype=np.int64)
    return flat.astype(np.int64), np.repeat(source, pieces).astype(np.int64)


def token_ends(tokens: Tensor, tokenizer: Tokenizer) -> Offsets:
    """Return the byte after each token, int64 ``(tokens,)``."""
    ids = tokens.numpy().astype(np.int64)
    sizes = np.zeros(int(ids.max()) + 1 if len(ids) else 1, dtype=np.int64)
    for number in np.unique(ids):
        sizes[number] = len(tokenizer.decode(torch.tensor([number])))
    return sizes[ids].cumsum()
