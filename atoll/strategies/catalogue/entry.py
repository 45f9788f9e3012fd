"""One row of the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Paper:
    """Where something was first written down."""

    title: str
    year: int
    url: str

    def __str__(self) -> str:
        """Return title and year."""
        return f"{self.title} ({self.year})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name that can stand in a job file, in words."""

    name: str
    """As it is written, without numbers."""
    line: str
    """What it does, in one line."""
    good_for: str
    """When to choose it."""
    papers: tuple[Paper, ...] = ()
    """The first one is the method's own."""
    optimizer: str = ""
    """Inner optimizer that belongs to it, where it is not the usual one."""
    page: str
    """Its page, below the project's root."""


def entry_table(entries: Iterable[Entry]) -> Mapping[str, Entry]:
    """Return entries by name, in their order."""
    return MappingProxyType({entry.name: entry for entry in entries})
