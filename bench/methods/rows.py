"""What is compared: methods with sensible codecs, most important first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WARM = {"shared_steps": 60, "outer_lr": 0.8, "outer_momentum": 0.75}
"""The warm start and the outer step of docs/tuning.md, for 600 steps."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    """Unique; the codec after a slash where it is not the preset's."""
    preset: str
    codec: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the inner optimizer."""
    overlap_steps: int = 0
    """Steps that are computed while a round is under way."""
    members: tuple[int, ...] = (4, 8)
    core: bool = False
    """Whether a shape needs it: such rows are run first, and with several seeds."""
    quick: bool = False
    """Whether it is part of the quick form."""


def _row(name: str, preset: str, codec: str = "fp32", **more: Any) -> Row:
    options = more.pop("options", {})
    return Row(name=name, preset=preset, codec=codec, options=options, **more)


def _diloco(name: str, codec: str = "fp32", *, every: int = 25, **more: Any) -> Row:
    options = WARM | {"every": every} | more.pop("options", {})
    return _row(name, "diloco", codec, options=options, **more)


ROWS: tuple[Row, ...] = (
    _row("alone", "alone", members=(1,), core=True, quick=True),
    _row("ddp", "ddp", core=True, quick=True),
    _diloco("diloco", core=True, quick=True),
    _diloco("diloco/int8", "feedback(int8)", core=True, quick=True),
    _diloco("diloco h10", every=10, core=True),
    _diloco("diloco h50", every=50, core=True),
    _diloco("diloco h200", every=200, core=True),
    _diloco("diloco cold", options={"shared_steps": 0}, core=True),
    _row("local-sgd", "local-sgd", options={"every": 25}, quick=True),
)
"""All rows, in the order in which they are run."""
