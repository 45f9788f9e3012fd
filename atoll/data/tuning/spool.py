"""Records become tokens in a temporary file, except those that are left out, which are counted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from atoll.data.tuning.conversations import Conversation, conversation_of
from atoll.data.tuning.filters import Condition, conditions
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.packing import Tokens
from atoll.data.tuning.preferences import Judged, judged_of, pair_of
from atoll.data.tuning.quality import Quality, Repeated, text_of
from atoll.data.tuning.rendering import Rendered, Renderer
from atoll.digest import Digest
from atoll.errors import DataError


@dataclass(slots=True)
class Spool:
    """Takes records and writes the tokens of those that are kept to a temporary file."""

    options: ExampleOptions
    renderer: Renderer
    quality: Quality = field(default_factory=Quality)
    sources: list[int] = field(default_factory=list)
    """The entry of `data` of every example that was kept."""
    good: list[bool] = field(default_factory=list)
    """The label of every example that was kept, if they have one."""
    hashed: Digest = field(default_factory=Digest)
    _ids: BinaryIO = field(default_factory=tempfile.TemporaryFile)
    _trained: BinaryIO = field(default_factory=tempfile.TemporaryFile)
    _bounds: list[int] = field(default_factory=lambda: [0])
    _repeated: Repeated = field(init=False)
    _latest: Judged | None = None
    _earlier: Judged | None = None
    """The newest labelled answer, and the newest to another prompt than that."""
    _waiting: list[tuple[Judged, Rendered, int]] = field(default_factory=list)
    """Labelled answers until there is one to another prompt, with their sources."""

    _conditions: list[Condition] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._conditions = conditions(self.options.keep)
        self.quality.labelled = self.options.judged
        self._repeated = Repeated(
            equal=self.options.deduplicate, similar=self.options.near_duplicates
        )

    def add(self, record: Mapping[str, Any], *, source: int) -> None:
        """Take one record."""
        quality = self.quality
        quality.records += 1
        if not all(condition.holds(record) for condition in self._conditions):
            quality.filtered += 1
            return
        try:
            if self.options.judged:
                for one in judged_of(record):
                    self._add_judged(one, source)
            elif self.options.pairs:
                self._add_pair(record, source)
            else:
                self._add_example(record, source)
        except DataError as error:
            quality.unreadable += 1
            quality.first_error = quality.first_error or f"(record {quality.records}): {error}"

    def end(self) -> None:
        """Write the answers that still wait for one to another prompt: no more records come."""
        for one, rendered, source in self._waiting:  # all of them have the same prompt
            self._keep_judged(one, rendered, source, other=self._latest or one)
        self._waiting = []

    def _add_example(self, record: Mapping[str, Any], source: int) -> None:
        """Take a record of what is to be predicted; raises DataError."""
        quality = self.quality
        conversation = conversation_of(record)
        rendered = self.renderer.render(conversation)
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
        """Take a record of two answers; raises DataError."""
        quality, options = self.quality, self.options
        both = pair_of(record)
        chosen, rejected = map(self.renderer.render, both)
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

    def _add_judged(self, one: Judged, source: int) -> None:
        """Take an answer with a label; raises DataError."""
        quality, options, said = self.quality, self.options, one.conversation
        if self._latest and bool(self._latest.conversation.messages) != bool(said.messages):
            raise DataError(
                "labelled answers are all chats, or all plain texts",
                given="a chat after plain texts" if said.messages else "a plain text after chats",
            )
        rendered = self.renderer.render(said, last=True)
        if self._repeated.equal(np.append(rendered.ids, np.int32(one.good))):
            quality.equal += 1
            return
        if self._repeated.similar(text_of(said.messages, said.prompt, said.completion)):
            quality.similar += 1
            return
        if int(rendered.trained[1:].sum()) < options.min_answer_tokens:
            quality.short += 1
            return
        # The prompt comes again, with at least one token of another answer.
        if len(rendered.ids) - 1 + int(rendered.trained.argmax()) > options.context:
            quality.long += 1
            return
        other = next(
            (x for x in (self._latest, self._earlier) if x and x.prompt != one.prompt), None
        )
        if self._latest and self._latest.prompt != one.prompt:
            self._earlier = self._latest
        self._latest = one
        if other is None:
            self._waiting.append((one, rendered, source))
            return
        for waiting, theirs, where in self._waiting:
            self._keep_judged(waiting, theirs, where, other=one)
        self._waiting = []
        self._keep_judged(one, rendered, source, other=other)

    def _keep_judged(self, one: Judged, rendered: Rendered, source: int, *, other: Judged) -> None:
        """Write an answer with a label, and its prompt with another one's answer, cut to fit."""
        room = self.options.context - len(rendered.ids) + 2
        second = self.renderer.render(one.with_answer_of(other), last=True)
        self._write(rendered)
        self._write(Rendered(second.ids[:room], second.trained[:room]), counted=False)
        self._count(source, len(rendered.ids))
        self.good.append(one.good)
        self.quality.good += one.good

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

    def _write(self, piece: Rendered, *, counted: bool = True) -> None:
        self._ids.write(piece.ids.tobytes())
        self._trained.write(piece.trained.tobytes())
        self.hashed.update(piece.ids.tobytes())
        self.hashed.update(piece.trained.tobytes())
        self._bounds.append(self._bounds[-1] + len(piece.ids))
        self.quality.trained_tokens += int(piece.trained[1:].sum()) * counted

    def _count(self, source: int, length: int) -> None:
        """Count an example of so many tokens."""
        quality = self.quality
        self.sources.append(source)
        quality.kept += 1
        quality.tokens += length
        quality.longest = max(quality.longest, length)
        quality.lengths.append(length)

    def arrays(self) -> Tokens:
        """Return ids and mask, mapped from their files, and the examples' bounds."""
        self._ids.flush()
        self._trained.flush()
        ids = np.memmap(self._ids, dtype=np.int32, mode="r")
        trained = np.memmap(self._trained, dtype=np.bool_, mode="r")
        return Tokens(ids, trained, np.array(self._bounds, dtype=np.int64))

    def close(self) -> None:
        """Close the files; what is mapped stays."""
        self._ids.close()
        self._trained.close()
