"""Builds the training and evaluation data of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.data.corpora import load_corpus
from atoll.data.split import HELD_OUT_CAP_BYTES, split_text
from atoll.data.tokens import Tokenizer, make_tokenizer
from atoll.digest import Digest
from atoll.errors import DataError


class HeldOutBatches(Protocol):
    """Evaluation batches for one model; for text `partial(held_out.batches, context=...)`."""

    def __call__(
        self, *, batch: int, limit_tokens: int | None = None, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `(inputs, targets)`, the same at every call, of about `limit_tokens` targets.

        The batches before the `first` one are left out.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Text for evaluation that no shard contains.

    `tokens` are 1-D ids; nats per token divided by `bytes_per_token` are nats per byte, comparable
    between tokenizers.
    """

    tokens: Tensor
    bytes_per_token: float

    def batches(
        self, *, context: int, batch: int, limit_tokens: int | None = None, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(inputs, targets)``, int64 ``(batch, context)``; the last one may be smaller.

        Weight losses by the number of sequences. The same arguments give the same batches;
        `limit_tokens` selects about this many tokens, evenly spread; the batches before the `first`
        one are left out. Raises DataError if the text is too short.
        """
        count = (len(self.tokens) - 1) // context
        if count < 1:
            raise DataError(
                "too little held-out text",
                given=f"{len(self.tokens)} tokens",
                expected=f"at least {context + 1}: one sequence of {context} and its targets",
                remedy="name more text, a larger held_out share or a shorter context",
            )
        wanted = count if limit_tokens is None else min(count, max(1, limit_tokens // context))
        chosen = np.arange(wanted, dtype=np.int64) * count // wanted
        tokens = self.tokens.numpy()
        reach = np.arange(context + 1, dtype=np.int64)
        for start in range(first * batch, wanted, batch):
            positions = chosen[start : start + batch, None] * context + reach
            windows = torch.from_numpy(tokens[positions].astype(np.int64))
            yield windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Tokens to train and evaluate on.

    Attributes:
        corpus: The spec it was loaded from.
        tokenizer: Trained on ``train`` only.
        train: 1-D ids, for :class:`~atoll.data.Shards`.
        held_out: Disjoint from ``train``.
        digest: Hexadecimal hash of all tokens, to compare between members.
    """

    corpus: str
    tokenizer: Tokenizer
    train: Tensor
    held_out: HeldOut
    digest: str

    @property
    def model_options(self) -> Mapping[str, object]:
        """Model options that depend on the text."""
        return {"vocab_size": self.tokenizer.vocab_size}

    def to_json(self) -> str:
        """Return the tokenizer as JSON, published with the weights."""
        return self.tokenizer.to_json()


def load_dataset(
    spec: str,
    *,
    seed: int,
    tokenizer: str | Tokenizer = "bytes",
    held_out: float = 0.05,
    held_out_cap_bytes: int = HELD_OUT_CAP_BYTES,
) -> Dataset:
    """Load the dataset of a job; the same on every member with the same files.

    The text is split before the tokenizer is trained, so that held-out text influences nothing.

    Args:
        spec: See :func:`~atoll.data.load_corpus`.
        seed: Selects the held-out blocks.
        tokenizer: See :func:`~atoll.data.make_tokenizer`; or an existing one.
        held_out: Share of the text that is held out.
        held_out_cap_bytes: Upper limit of the held-out text.

    Raises:
        ConfigError: an unknown name or a number out of range.
        DataError: the text is missing, unreadable or too small.
    """
    text = load_corpus(spec).text
    split = split_text(text, share=held_out, seed=seed, cap_bytes=held_out_cap_bytes)
    maker = tokenizer
    if isinstance(maker, str):
        maker = make_tokenizer(maker, text=split.train)
    train, rest = maker.encode(split.train), maker.encode(split.held_out)
    return Dataset(
        corpus=spec,
        tokenizer=maker,
        train=train,
        held_out=HeldOut(rest, len(split.held_out) / max(1, len(rest))),
        digest=digest_of(train, rest),
    )


def digest_of(train: Tensor, held_out: Tensor) -> str:
    """Return the hash of all tokens of a dataset."""
    digest = Digest()
    for tokens in (train, held_out):
        digest.update(len(tokens).to_bytes(8, "little"))
        update_with(digest, tokens)
    return digest.hexdigest()


def update_with(digest: Digest, tokens: Tensor) -> None:
    """Hash tokens in blocks, since they may be in a file that memory does not hold."""
    ids = tokens.numpy()
    for start in range(0, len(ids), HASHED_TOKENS):
        digest.update(ids[start : start + HASHED_TOKENS].astype("<u4").tobytes())


HASHED_TOKENS = 1 << 20
