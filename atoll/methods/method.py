"""What a row of the table of methods says.

A row is a frozen dataclass. Its fields are the keys of `[strategy]` in a job file, its class
attributes say what the method can be combined with, and the class that trains is named by a path,
so that reading the table loads no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Paper:
    """A publication."""

    title: str
    year: int
    url: str

    def __str__(self) -> str:
        """Return title and year."""
        return f"{self.title} ({self.year})"


def arxiv(number: str, title: str, year: int) -> Paper:
    """Return a paper on arXiv."""
    return Paper(title, year, f"https://arxiv.org/abs/{number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A well-known method: a name in a job file for an outer strategy, a codec and options."""

    name: str
    line: str
    """What it does, in one line."""
    good_for: str
    """When to choose it."""
    papers: tuple[Paper, ...] = ()
    """The first one is the method's own."""
    codec: str = "fp32"
    inner: str = "local"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Options of the outer strategy that differ from its defaults."""
    optimizer: str = ""
    """Inner optimizer that belongs to it, where it is not the usual one."""
    outer: str = ""
    """Name of the outer strategy. The table fills it in, and the page."""
    page: str = ""
    """Path of its page below the project's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSupport:
    """Which codecs a method cannot use. Codecs declare the same properties in their own rows."""

    why: str
    one_mean: bool = False
    """The mean of several packets must fit one packet: no codec that needs an all-gather."""
    memory: bool = True
    """Whether a codec may remember one vector until the next."""
    precise_only: bool = False
    """Only codecs that keep nothing and lose next to nothing of any number."""
    refused: frozenset[str] = frozenset()
    """Further codecs, by name."""
    nearest: str
    """One that works, for messages."""


def option(default: T, line: str) -> T:
    """Return a dataclass field with a default and one line that `atoll methods` shows."""
    value: T = field(default=default, metadata={"line": line})
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """One key of `[strategy]`."""

    name: str
    kind: str
    """Its type, as written."""
    default: Any
    line: str


class Method:
    """Base of the rows. A subclass is a frozen dataclass whose fields are made by :func:`option`.

    What may depend on the options of a job is a property here; a row overrides it with a constant
    or with another property.
    """

    name: ClassVar[str]
    """`outer` in a job file."""
    implementation: ClassVar[str]
    """`module:Class` of the outer strategy, which takes the options as its one argument."""
    pages: ClassVar[str] = "."
    """Folder below docs/methods with a page for each preset."""
    presets: ClassVar[tuple[Preset, ...]] = ()
    codecs: ClassVar[CodecSupport | None] = None
    """Which codecs it cannot use; None: it can use all."""
    needs_servers: ClassVar[bool] = False
    """Whether members meet at parameter servers, which are reached through the hub only."""
    exchanges: ClassVar[bool] = True
    """Whether members exchange what they learn. If not, each trains a model of its own."""

    @property
    def later_vectors(self) -> float:
        """Vectors as long as the model that a member makes in its first rounds, after `setup`."""
        return 0.0

    @property
    def has_mean(self) -> bool:
        """Whether one mean of all members exists, which another rule or collective could make."""
        return True

    @property
    def uses_gradients(self) -> bool:
        """Whether gradients of single steps are combined; those of an island stay inside it."""
        return False

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse options that contradict each other or the job. By default nothing is refused.

        Args:
            nodes: Members that are to train together.
            min_nodes: Fewest with whom rounds must be possible.
            optimizer: The inner one, as in `[train]`; empty if it is not known.

        Raises:
            ConfigError: with the reason and the nearest thing that works.
        """

    def build(self) -> Any:
        """Return an `atoll.strategies.base.Outer` with these options; loads torch.

        Raises:
            ConfigError: an option is out of range.
        """
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)(self)

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the keys of `[strategy]` that belong to this method."""
        return tuple(
            Option(each.name, str(each.type), each.default, each.metadata.get("line", ""))
            for each in dataclasses.fields(cls)  # type: ignore[arg-type]
        )
