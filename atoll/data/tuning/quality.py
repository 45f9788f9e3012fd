"""What was found in the examples, and which of them are left out."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError

_PERMUTATIONS = 128
"""Hash functions of a MinHash: the similarity's standard error is at most 0.045."""
_SHINGLE = 5
"""Words of a shingle: texts are compared as sets of these."""


@dataclass(slots=True)
class Quality:
    """Counts over all examples, for people."""

    records: int = 0
    kept: int = 0
    unreadable: int = 0
    """Records without known columns, or that the template refuses."""
    filtered: int = 0
    """Records that do not meet a condition of `keep`."""
    equal: int = 0
    similar: int = 0
    short: int = 0
    """Examples with fewer trained tokens than `min_answer_tokens`, after truncation."""
    long: int = 0
    """Pairs of answers that do not fit into the context."""
    good: int = 0
    """Answers that are labelled as good."""
    labelled: bool = False
    truncated: int = 0
    """Longer than the context; their end was cut off. Plain texts are split instead."""
    rewritten: int = 0
    """Answers not trained on, because the template rewrites them in later turns."""
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    lengths: array[int] = field(default_factory=lambda: array("I"), repr=False)
    first_error: str = ""

    def sentences(self) -> list[str]:
        """Return the report in lines."""
        lines = [f"{self.records} records, none of which can be used"]
        if self.kept:
            middle, most = np.percentile(np.array(self.lengths), [50, 95])
            lines = [
                f"{self.kept} examples of {self.records} records, {self.tokens} tokens, "
                f"{self.trained_tokens} of them trained on "
                f"({100 * self.trained_tokens / max(1, self.tokens):.0f} %)",
                f"length in tokens: median {middle:.0f}, 95 % below {most:.0f}, "
                f"longest {self.longest}",
            ]
            if self.labelled:
                lines.append(f"{self.good} good answers, {self.kept - self.good} bad ones")
        reasons = (
            (self.filtered, "left out: not as `keep` wants them"),
            (self.equal, "left out: equal to an earlier one"),
            (self.similar, "left out: similar to an earlier one"),
            (self.short, "left out: too few tokens to train on"),
            (self.unreadable, f"left out: unreadable, first {self.first_error}"),
            (
                self.long,
                "left out: longer than the context"
                if self.labelled
                else "left out: both answers together are longer than the context",
            ),
            (self.truncated, "cut at the context"),
            (self.rewritten, "answers not trained on: the template rewrites them later"),
        )
        return [*lines, *(f"{count} {reason}" for count, reason in reasons if count)]


class Repeated:
    """Recognises examples that are equal or similar to an earlier one."""

    def __init__(self, *, equal: bool, similar: float) -> None:
        """Compare examples.

        `equal` and `similar` choose how; `similar` is the least Jaccard similarity of two examples'
        shingles that counts, 0: none is compared.

        Raises:
            ConfigError: comparing needs `datasketch`, which is not installed.
        """
        self._seen: set[bytes] | None = set() if equal else None
        self._index, self._number = _index(similar) if similar else None, 0

    def equal(self, ids: NDArray[np.int32]) -> bool:
        """Return whether an example with these ids came before."""
        if self._seen is None:
            return False
        digest = hashlib.blake2b(ids.tobytes(), digest_size=12).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False

    def similar(self, text: str) -> bool:
        """Return whether a text like this one came before.

        MinHash (Broder, "On the resemblance and containment of documents", 1997) with locality
        sensitive hashing, of sets of five neighbouring words. Both errors are possible: the
        similarity is an estimate.
        """
        if self._index is None:
            return False
        from datasketch import MinHash

        words = re.findall(r"\w+", text.lower())
        last = max(1, len(words) - _SHINGLE + 1)
        marks = {" ".join(words[at : at + _SHINGLE]).encode() for at in range(last)}
        mark = MinHash(num_perm=_PERMUTATIONS, seed=1)
        mark.update_batch(marks)
        if self._index.query(mark):
            return True
        self._index.insert(self._number, mark)
        self._number += 1
        return False


def _index(similarity: float) -> Any:
    try:
        from datasketch import MinHashLSH
    except ImportError as error:
        raise ConfigError(
            "finding similar examples needs a library that is not installed", given=str(error),
            expected="datasketch", remedy="pip install 'atoll[tune]', or near_duplicates = 0",
        ) from error  # fmt: skip
    return MinHashLSH(threshold=similarity, num_perm=_PERMUTATIONS)


def text_of(messages: Sequence[dict[str, str]], *plain: str) -> str:
    """Return the text of an example, for the comparison of texts."""
    return "\n".join([*(message["content"] for message in messages), *plain])
