"""Which records are kept, by conditions on their columns: `score >= 4`, `language = en`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError

_FORM = re.compile(r"\s*([\w.-]+)\s*(<=|>=|!=|=|<|>)\s*(?![\s=<>!])(.*?)\s*")
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a column with a number or a text."""

    column: str
    compared: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `COLUMN OP VALUE`.

        Raises:
            ConfigError: it has another form.
        """
        found = _FORM.fullmatch(text)
        number = found is not None and _number(found[3]) is not None
        if found is None or not (number or found[2] in ("=", "!=")):
            raise ConfigError(
                "a condition on records cannot be read", given=repr(text),
                expected=f"COLUMN, one of {' '.join(_COMPARED)}, and a number; or = or != and a "
                "text",
                remedy='e.g. keep = ["score >= 4", "language = en"] in [tune]',
            )  # fmt: skip
        return cls(found[1], found[2], found[3])

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record meets it; False if the column is missing or of another kind."""
        given = record.get(self.column)
        if given is None:
            return False
        wanted, number = _number(self.value), _number(given)
        compare = _COMPARED[self.compared]
        if wanted is not None and number is not None:
            return compare(number, wanted)
        if self.compared not in ("=", "!="):
            return False
        said = str(given).lower() if isinstance(given, bool) else str(given).strip()
        return compare(said, self.value)


def conditions(texts: Sequence[str]) -> list[Condition]:
    """Return the conditions that a record must all meet; raises ConfigError."""
    return [Condition.parse(text) for text in texts]


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
