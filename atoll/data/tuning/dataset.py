"""Builds the examples of a job: read, rendered, compared, held out, packed and dealt to slots.

All of it depends only on the files, the tokenizer and the seed, so members agree without talking.
One record is in memory at a time; tokens go to an unnamed temporary file (5 bytes each), which is
mapped, so a data set may be larger than memory. The position in it is a cursor of three numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.order import hashes, permutation
from atoll.data.tokens import PretrainedTokenizer
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.packing import Rows
from atoll.data.tuning.quality import Quality
from atoll.data.tuning.records import find_files, read_records
from atoll.data.tuning.rendering import Renderer
from atoll.data.tuning.spool import Spool
from atoll.digest import Digest
from atoll.errors import ConfigError, DataError

_ORDER_KEY, _HELD_OUT_KEY, _COPY_KEY = 0x74756E65, 0x68656C64, 0x636F7079
_MOST_HELD_OUT = 4096
"""Most examples that are held out."""


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSet:
    """Examples to train and evaluate on.

    Attributes:
        corpus: The patterns of its files.
        tokenizer: The model's own.
        train: Packed rows of one pass.
        held_out: Rows of examples that no row of `train` contains.
        digest: Hexadecimal hash of all tokens, to compare between members.
        quality: What was found in the files.
    """

    corpus: str
    tokenizer: PretrainedTokenizer
    train: Rows
    held_out: Rows
    digest: str
    quality: Quality

    @property
    def model_options(self) -> Mapping[str, object]:
        """Model options that depend on the text."""
        return {"vocab_size": self.tokenizer.vocab_size}

    def to_json(self) -> str:
        """Return the tokenizer as JSON, published with the weights."""
        return self.tokenizer.to_json()

    def batches(
        self, *, batch: int, limit_tokens: int | None = None, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield held-out rows; see :class:`~atoll.data.HeldOutBatches`."""
        count = len(self.held_out)
        wanted = count
        if limit_tokens is not None:
            wanted = min(count, max(1, limit_tokens // self.held_out.length))
        chosen = np.arange(wanted, dtype=np.int64) * count // max(1, wanted)
        for start in range(first * batch, wanted, batch):
            yield self.held_out.batch(chosen[start : start + batch])


class ExampleShards:
    """The rows of every slot; see :class:`~atoll.data.Deal`."""

    def __init__(self, rows: Rows, *, slots: int, seed: int, order: str = "shuffled") -> None:
        """Deal rows to slots, none to two.

        Raises:
            DataError: there are fewer rows than slots.
        """
        if len(rows) < slots:
            raise DataError(
                "too few examples to train on",
                given=f"{len(rows)} rows of {rows.length} tokens",
                expected=f"at least one for each of {slots} members",
                remedy="more data, fewer members, a shorter context, or pack = false in [tune]",
            )
        self.seed, self._data = seed, rows
        numbers = np.arange(len(rows), dtype=np.int64)
        if order == "contiguous":
            self._slots = np.array_split(numbers, slots)
        else:
            shuffled = permutation(len(rows), key=(seed, _ORDER_KEY))
            self._slots = [np.ascontiguousarray(shuffled[slot::slots]) for slot in range(slots)]

    def num_windows(self, slot: int) -> int:
        """Return the number of rows of a slot."""
        if not 0 <= slot < len(self._slots):
            raise ConfigError(
                "no such data slot", given=slot, expected=f"0 to {len(self._slots) - 1}"
            )
        return len(self._slots[slot])

    def batch(self, slot: int, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return some rows of a slot; see :meth:`Rows.batch`."""
        return self._data.batch(self._slots[slot][windows])


def load_examples(
    options: ExampleOptions,
    tokenizer: Any,
    *,
    progress: Callable[[int], None] = lambda records: None,
) -> ExampleSet:
    """Load the examples of a job; the same on every member with the same files.

    Args:
        options: Which, and how.
        tokenizer: Of `transformers`, a fast one.
        progress: Called now and then with the number of records read.

    Raises:
        ConfigError: the model has no chat template, or a library is missing.
        DataError: a file is missing or damaged, or nothing in them can be used.
    """
    files = find_files(options.data)
    renderer = Renderer(
        tokenizer, template=options.template,
        completion_only=options.completion_only or options.judged,
    )  # fmt: skip
    with contextlib.closing(Spool(options, renderer)) as spool:
        quality = spool.quality
        for number, group in enumerate(files):
            for file in group:
                for record in read_records(file):
                    spool.add(record, source=number)
                    if quality.records % 1000 == 0:
                        progress(quality.records)
        spool.end()
        progress(quality.records)
        _check_enough(quality)
        tokens = spool.arrays()
    held_out, train = _split(quality.kept, options)
    train = _weighted(train, spool.sources, options)
    rows = partial(
        Rows, tokens, length=options.context,
        pack=options.pack and not options.pairs, pairs=options.pairs,
        good=np.array(spool.good, dtype=np.bool_) if options.judged else None,
    )  # fmt: skip
    digest = Digest()
    labels = bytes(spool.good)
    parts = (
        spool.hashed.digest(),
        tokens.bounds.tobytes(),
        train.tobytes(),
        held_out.tobytes(),
        labels,
    )
    for array in parts:
        digest.update(array)
    return ExampleSet(
        corpus=", ".join(options.data),
        tokenizer=PretrainedTokenizer(tokenizer.backend_tokenizer),
        train=rows(train),
        held_out=rows(held_out),
        digest=digest.hexdigest(),
        quality=quality,
    )


def _check_enough(quality: Quality) -> None:
    if quality.kept < 2:
        raise DataError(
            "there are too few examples to train on and to evaluate with",
            given=f"{quality.kept} usable of {quality.records} records",
            expected="at least 2 examples",
            remedy="; ".join(quality.sentences()),
        )


def _split(count: int, options: ExampleOptions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the examples held out, and those to train on in a random order."""
    wanted = min(max(1, round(count * options.held_out)), _MOST_HELD_OUT, count - 1)
    shuffled = permutation(count, key=(options.seed, _HELD_OUT_KEY))
    return np.sort(shuffled[:wanted]), shuffled[wanted:]


def _weighted(
    train: NDArray[np.int64], sources: Sequence[int], options: ExampleOptions
) -> NDArray[np.int64]:
    """Return the examples of one pass: each as often as the weight of its files says.

    Of a weight of 2.25 every example comes twice, and a quarter of them, by hash, once more.
    """
    if not options.weights:
        return train
    weight = np.array(options.weights, dtype=np.float64)[np.array(sources)]
    chance = hashes(len(sources), key=(options.seed, _COPY_KEY)) / 2.0**64
    copies = np.floor(weight).astype(np.int64) + (chance < weight % 1.0)
    rounds = [train[copies[train] > done] for done in range(int(copies[train].max(initial=0)))]
    if not rounds:
        raise DataError(
            "the weights leave no example", given=f"weights = {list(options.weights)}",
            expected="larger weights", remedy="weights = [1, ...] in [tune]",
        )  # fmt: skip
    return np.concatenate(rounds)
