"""Builds the examples of a job: read, rendered, compared, held out, packed and dealt to slots.

All of it depends only on the files, the tokenizer and the seed, so members agree without talking.
One record is in memory at a time; tokens go to an unnamed temporary file (5 bytes each), which is
mapped, so a data set may be larger than memory. The position in it is a cursor of three numbers.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.order import hashes, permutation
from atoll.data.pretrained import PretrainedTokenizer
from atoll.data.tuning.conversations import Conversation, conversation_of
from atoll.data.tuning.packing import Rows
from atoll.data.tuning.preferences import pair_of
from atoll.data.tuning.quality import Quality, Repeated, text_of
from atoll.data.tuning.records import find_files, read_records
from atoll.data.tuning.rendering import Rendered, Renderer
from atoll.digest import Digest
from atoll.errors import ConfigError, DataError

_ORDER_KEY, _HELD_OUT_KEY, _COPY_KEY = 0x74756E65, 0x68656C64, 0x636F7079
_MOST_HELD_OUT = 4096
"""Most examples that are held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleOptions:
    """Which examples, and how they become rows; the keys of `[tune]` of the same names."""

    data: Sequence[str]
    weights: Sequence[float] = ()
    context: int
    seed: int
    held_out: float = 0.05
    template: str = ""
    completion_only: bool = True
    pack: bool = True
    deduplicate: bool = True
    near_duplicates: float = 0.0
    min_answer_tokens: int = 1
    objective: str = "answers"

    @property
    def pairs(self) -> bool:
        """Whether an example is two answers, of which one is preferred."""
        return self.objective == "dpo"


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
        tokenizer, template=options.template, completion_only=options.completion_only
    )
    with contextlib.closing(_Spool(options, renderer)) as spool:
        quality = spool.quality
        for number, group in enumerate(files):
            for file in group:
                for record in read_records(file):
                    spool.add(record, source=number)
                    if quality.records % 1000 == 0:
                        progress(quality.records)
        progress(quality.records)
        _check_enough(quality)
        ids, trained, bounds = spool.arrays()
    held_out, train = _split(quality.kept, options)
    train = _weighted(train, spool.sources, options)
    rows = partial(
        Rows, ids, trained, bounds, length=options.context,
        pack=options.pack and not options.pairs, pairs=options.pairs,
    )  # fmt: skip
    digest = Digest()
    for array in (spool.hashed.digest(), bounds.tobytes(), train.tobytes(), held_out.tobytes()):
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
            given=f"{quality.kept} usable of {quality.records} records; {quality.first_error}",
            expected="at least 2 examples",
            remedy="; ".join(quality.sentences()),
        )


@dataclass(slots=True)
class _Spool:
    """Takes records and writes the tokens of those that are kept to a temporary file."""

    options: ExampleOptions
    renderer: Renderer
    quality: Quality = field(default_factory=Quality)
    sources: list[int] = field(default_factory=list)
    """The entry of `data` of every example that was kept."""
    hashed: Digest = field(default_factory=Digest)
    _ids: BinaryIO = field(default_factory=tempfile.TemporaryFile)
    _trained: BinaryIO = field(default_factory=tempfile.TemporaryFile)
    _bounds: list[int] = field(default_factory=lambda: [0])
    _repeated: Repeated = field(init=False)

    def __post_init__(self) -> None:
        self._repeated = Repeated(
            equal=self.options.deduplicate, similar=self.options.near_duplicates
        )

    def add(self, record: Mapping[str, Any], *, source: int) -> None:
        """Take one record."""
        quality = self.quality
        quality.records += 1
        if self.options.pairs:
            self._add_pair(record, source)
            return
        try:
            conversation = conversation_of(record)
            rendered = self.renderer.render(conversation)
        except DataError as error:
            quality.unreadable += 1
            quality.first_error = quality.first_error or f"(record {quality.records}): {error}"
            return
        if self._repeated.equal(rendered.ids):
            quality.equal += 1
            return
        said = text_of(conversation.messages, conversation.prompt, conversation.completion)
        if self._repeated.similar(said):
            quality.similar += 1
            return
        quality.rewritten += rendered.rewritten
        for piece in self._pieces(conversation, rendered):
            self._keep(piece, source)

    def _add_pair(self, record: Mapping[str, Any], source: int) -> None:
        """Take a record of two answers."""
        quality, options = self.quality, self.options
        try:
            both = pair_of(record)
            chosen, rejected = map(self.renderer.render, both)
        except DataError as error:
            quality.unreadable += 1
            quality.first_error = quality.first_error or f"(record {quality.records}): {error}"
            return
        if self._repeated.equal(np.concatenate([chosen.ids, rejected.ids])):
            quality.equal += 1
            return
        said = [text_of(one.messages, one.prompt, one.completion) for one in both]
        if self._repeated.similar("\n".join(said)):
            quality.similar += 1
            return
        if len(chosen.ids) + len(rejected.ids) - 2 > options.context:
            quality.long += 1  # half an answer has no preference
            return
        least = min(int(one.trained[1:].sum()) for one in (chosen, rejected))
        if least < options.min_answer_tokens:
            quality.short += 1
            return
        for one in (chosen, rejected):
            self._write(one)
        self._count(source, len(chosen.ids) + len(rejected.ids))

    def _pieces(self, conversation: Conversation, rendered: Rendered) -> Iterator[Rendered]:
        """Yield an example, cut at the context; a plain text in as many pieces as it takes."""
        most, length = self.options.context + 1, len(rendered.ids)
        plain = not conversation.messages and not conversation.prompt
        if length > most and not plain:
            self.quality.truncated += 1
        starts = range(0, max(1, length - 1), self.options.context) if plain else (0,)
        for start in starts:
            yield Rendered(
                rendered.ids[start : start + most], rendered.trained[start : start + most]
            )

    def _keep(self, piece: Rendered, source: int) -> None:
        if int(piece.trained[1:].sum()) < self.options.min_answer_tokens:
            self.quality.short += 1
            return
        self._write(piece)
        self._count(source, len(piece.ids))

    def _write(self, piece: Rendered) -> None:
        self._ids.write(piece.ids.tobytes())
        self._trained.write(piece.trained.tobytes())
        self.hashed.update(piece.ids.tobytes())
        self.hashed.update(piece.trained.tobytes())
        self._bounds.append(self._bounds[-1] + len(piece.ids))
        self.quality.trained_tokens += int(piece.trained[1:].sum())

    def _count(self, source: int, length: int) -> None:
        """Count an example of so many tokens."""
        quality = self.quality
        self.sources.append(source)
        quality.kept += 1
        quality.tokens += length
        quality.longest = max(quality.longest, length)
        quality.lengths.append(length)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
        """Return ids and mask, mapped from their files, and the examples' bounds."""
        self._ids.flush()
        self._trained.flush()
        ids = np.memmap(self._ids, dtype=np.int32, mode="r")
        trained = np.memmap(self._trained, dtype=np.bool_, mode="r")
        return ids, trained, np.array(self._bounds, dtype=np.int64)

    def close(self) -> None:
        """Close the files; what is mapped stays."""
        self._ids.close()
        self._trained.close()


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
