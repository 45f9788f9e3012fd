"""The format of a row in the table of methods.

Its fields are the keys of `[strategy]`, its class attributes state what the method can be combined
with, and its implementation is named by a path, so that reading the table does not load torch.
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
    """A well-known method: a name for an outer strategy, a codec and options."""

    name: str
    line: str
    good_for: str
    papers: tuple[Paper, ...] = ()
    """The method's own first."""
    codec: str = "fp32"
    inner: str = "local"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Options that differ from the defaults of the outer strategy."""
    optimizer: str = ""
    """Inner optimizer, if not the usual one."""
    by_rounds: bool = False
    """Whether the outer rate and momentum follow from the number of rounds, where that is known."""
    loss: str = ""
    """Held-out loss against that of `diloco` at equal steps (`python -m bench.tuning held-out`
    and `images`)."""
    outer: str = ""
    """Outer strategy; like `page`, set by the table."""
    page: str = ""
    """Path relative to the project's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSupport:
    """Which codecs a method can use, by properties that codecs declare in their rows."""

    why: str
    one_mean: bool = False
    """The mean of several packets must fit into one packet: no codec that needs an all-gather."""
    memory: bool = True
    """Whether a codec may keep state from one vector to the next."""
    precise_only: bool = False
    """Only codecs without state and with negligible loss."""
    refused: frozenset[str] = frozenset()
    """Further codecs that cannot be used."""
    nearest: str
    """A codec to suggest in messages."""


def option(default: T, line: str) -> T:
    """Return a dataclass field with a default and the description for `atoll methods`."""
    value: T = field(default=default, metadata={"line": line})
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """A key of `[strategy]`."""

    name: str
    kind: str
    default: Any
    line: str


class Method:
    """Base class of rows. A subclass is a frozen dataclass with fields made by :func:`option`.

    Properties may depend on the options; rows override them with constants or properties.
    """

    name: ClassVar[str]
    """`outer` in a job file."""
    implementation: ClassVar[str]
    """`module:Class` of the outer strategy; its only argument is the row."""
    pages: ClassVar[str] = "."
    """Folder below docs/methods with a page per preset."""
    presets: ClassVar[tuple[Preset, ...]] = ()
    codecs: ClassVar[CodecSupport | None] = None
    """None: all codecs can be used."""
    needs_servers: ClassVar[bool] = False
    """Whether members communicate with parameter servers, which are reached through the hub only.
    """
    exchanges: ClassVar[bool] = True
    """False: each member trains its own model."""

    interval_may_change: ClassVar[bool] = False
    """Whether the hub may change `every` in a running job."""

    per_stage: ClassVar[bool] = False
    """Whether the members of one stage of a SWARM can use it among themselves."""

    @property
    def later_vectors(self) -> float:
        """Vectors as long as the model that a member allocates after `setup`."""
        return 0.0

    @property
    def has_mean(self) -> bool:
        """Whether one mean of all members exists, so that other rules or collectives apply."""
        return True

    @property
    def uses_gradients(self) -> bool:
        """Whether gradients of single steps are combined; those of an island stay inside it."""
        return False

    def check(self, *, nodes: int, min_nodes: int, optimizer: str) -> None:
        """Refuse options that contradict each other or the job; the default accepts all.

        `min_nodes` are needed in a round; `optimizer` is that of `[train]`, empty if unknown.
        Raises ConfigError with the reason and the nearest valid option.
        """

    def build(self) -> Any:
        """Return a `strategies.base.Outer` (loads torch); raises ConfigError."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)(self)

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return this method's keys of `[strategy]`."""
        return tuple(
            Option(each.name, str(each.type), each.default, each.metadata.get("line", ""))
            for each in dataclasses.fields(cls)  # type: ignore[arg-type]
        )
