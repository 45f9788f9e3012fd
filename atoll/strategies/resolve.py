"""Resolve `[strategy]` of a job file into a method, a codec and an aggregation. Loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from atoll.config import StrategyTable, read_table
from atoll.errors import ConfigError, unknown
from atoll.group.aggregation import Aggregation
from atoll.methods.method import Method
from atoll.methods.table import METHODS, PRESETS

if TYPE_CHECKING:
    from atoll.strategies.base import Outer

INNERS: Mapping[str, str] = MappingProxyType(
    {
        "local": "atoll.strategies.inner.local:Local",
        **dict.fromkeys(
            ("ddp", "fsdp", "tensor", "pipeline", "hybrid"),
            "atoll.strategies.inner.leader:IslandLeader",
        ),
        "swarm": "atoll.strategies.inner.swarm.runner:StageRunner",
        "paths": "atoll.strategies.inner.local:Local",
    }
)
"""Name -> class of the inner strategy."""

FIRST_STEPS: Mapping[str, int] = MappingProxyType(
    {"shared_steps": 10, "every_step_until": 2, "warmup_steps": 5}
)
"""Option that counts initial steps -> n: a preset's value is limited to 1/n of the run."""

FEW_ROUNDS = 40
"""Runs of fewer rounds want less outer momentum: there is no time for it to build up."""


def outer_step(rounds: int) -> dict[str, float]:
    """Return the outer rate and momentum for a run of so many rounds of the same parameters.

    Measured at 3 to 30 rounds and at 57 (`docs/measured/tuning.md`).
    """
    few = rounds < FEW_ROUNDS
    return {"outer_lr": 0.7 if few else 0.8, "outer_momentum": 0.5 if few else 0.75}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A strategy with all defaults filled in."""

    method: Method
    """The outer strategy, with all its options."""
    inner: str = "local"
    codec: str = "fp32"
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the group combines the members' values."""

    @property
    def outer(self) -> str:
        """Name of the outer strategy."""
        return self.method.name

    def names(self) -> dict[str, str]:
        """Return the three names, and an unusual aggregation, for summaries."""
        plain, words = Aggregation(), dataclasses.asdict(self.aggregation)
        unusual = {name: word for name, word in words.items() if word != getattr(plain, name)}
        return {"inner": self.inner, "outer": self.outer, "codec": self.codec} | unusual

    def build(self) -> Outer:
        """Return the outer strategy; loads torch.

        Raises:
            ConfigError: an option is out of range.
        """
        outer: Outer = self.method.build()
        return outer


def resolve(table: StrategyTable, *, steps: int | None = None) -> Resolved:
    """Return the strategy of a `[strategy]` table; the codec is checked when it is built.

    Missing keys come from the preset; its options apply only to its own outer strategy.

    Args:
        table: The table of the job file.
        steps: Of the run; limits a preset's first steps (`FIRST_STEPS`), and decides on the outer
            rate and momentum of some (`outer_step`).

    Raises:
        ConfigError: a name or an option is unknown (the nearest one is named), or an option has the
            wrong type.
    """
    if table.preset not in PRESETS:
        raise unknown("preset of strategies", table.preset, PRESETS)
    preset = PRESETS[table.preset]
    outer, inner = table.outer or preset.outer, table.inner or preset.inner
    if inner not in INNERS:
        raise unknown("inner strategy", inner, INNERS)
    options = dict(preset.options if outer == preset.outer else {})
    for name, share in FIRST_STEPS.items():
        if steps is not None and name in options:
            options[name] = min(options[name], steps // share)
    every = table.options.get(
        "every", options.get("every", getattr(METHODS.get(outer), "every", 0))
    )
    if (
        steps
        and preset.by_rounds
        and outer == preset.outer
        and isinstance(every, int)
        and every > 0
    ):
        options |= outer_step(steps // every)
    aggregation = Aggregation(
        aggregate=table.aggregate, collective=table.collective, admission=table.admission
    )
    return Resolved(
        inner=inner, method=read_method(outer, options | dict(table.options)),
        codec=table.codec or preset.codec, aggregation=aggregation,
    )  # fmt: skip


def read_method(outer: str, options: Mapping[str, Any]) -> Method:
    """Return an outer strategy from options as written in a job file.

    Raises:
        ConfigError: the name or an option is unknown, or an option has the wrong type.
    """
    if outer not in METHODS:
        raise unknown("outer strategy", outer, METHODS)
    kind, where = METHODS[outer], f"[strategy] with outer = {outer!r}"
    own = {option.name for option in kind.options()}
    words = {field.name for field in dataclasses.fields(StrategyTable)} - {"options"}
    for name in options:
        if name not in own:  # it may also be a misspelt key of the table itself
            raise unknown(f"key in {where}", name, own | words)
    method: Method = read_table(kind, options, where=where)
    return method


def resolve_outer(
    outer: object, *, codec: str = "", steps: int | None = None
) -> tuple[Method, str]:
    """Return options and codec for the `outer` of `run.wrap`: a name or options.

    Args:
        outer: Name of a preset or an outer strategy, or an options object like `DiLoCo()`.
        codec: The codec; empty for the preset's, or fp32.
        steps: Of the run, on which some options of presets depend; see :func:`resolve`.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(outer, Method):
        return outer, codec or "fp32"
    if not isinstance(outer, str):
        raise ConfigError(
            "outer is neither a name nor options of a strategy",
            given=repr(outer),
            expected='"diloco" or atoll.DiLoCo(every=500)',
        )
    if outer in PRESETS:
        resolved = resolve(StrategyTable(preset=outer, codec=codec), steps=steps)
        return resolved.method, resolved.codec
    if outer in METHODS:
        return METHODS[outer](), codec or "fp32"
    raise unknown("outer strategy", outer, {*PRESETS, *METHODS})


def without_shared_steps(method: Method, codec: str) -> tuple[Method, str]:
    """Return options without first steps on the same data, and the codec unchanged.

    With `run.wrap` the script reads the data, so Atoll cannot give every member the same.
    """
    if getattr(method, "shared_steps", 0):
        method = dataclasses.replace(method, shared_steps=0)  # type: ignore[type-var]
    return method, codec
