"""What was measured already: one JSON object a line, appended as soon as a run has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
KEY = ("kind", "row", "members", "seed", "steps", "scale", "link", "route")


class Ledger:
    """A file of records; a run that is in it is not run again."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that was cut off is dropped."""
        self.path = path
        self.records: list[Record] = []
        self._known: set[tuple[Any, ...]] = set()
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    self._take(json.loads(line))
                except ValueError:
                    continue

    def _take(self, record: Record) -> None:
        if key(record) not in self._known:
            self._known.add(key(record))
            self.records.append(record)

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        """Return whether there is a record of the same run."""
        return key(record) in self._known

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def add(self, record: Record) -> None:
        """Keep a record, on the disk before this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut and self.records else "") + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(record)

    def of(self, kind: str, **wanted: Any) -> list[Record]:
        """Return the records of a kind that have these values."""
        wanted["kind"] = kind
        return [r for r in self.records if wanted.items() <= r.items()]


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what makes two records ones of the same run."""
    return tuple(record.get(name) for name in KEY)
