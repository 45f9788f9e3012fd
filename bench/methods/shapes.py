"""What the literature says about these methods, and whether it comes out here.

Every claim is decided on differences within a seed: same model, same data order, same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.methods.ledger import Record
from bench.methods.rows import FRAGMENTS

T_QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
"""Degrees of freedom -> two-sided 95 % quantile of Student's t."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and where it may lie."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the mean with its 95 % interval; of one value the interval is unknown."""
        n = len(values)
        mean = math.fsum(values) / n
        if n < 2:
            return cls(mean, -math.inf, math.inf, n)
        variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
        half = T_QUANTILES.get(n - 1, 1.96) * math.sqrt(variance / n)
        return cls(mean, mean - half, mean + half, n)

    def plain(self) -> dict[str, Any]:
        """Return plain values; unknown bounds are None."""
        known = self.seeds > 1
        return {
            "mean": round(self.mean, 5),
            "low": round(self.low, 5) if known else None,
            "high": round(self.high, 5) if known else None,
            "seeds": self.seeds,
        }


class Losses:
    """Held-out losses by row, members and seed."""

    def __init__(self, records: Sequence[Record]) -> None:
        """Sort records of runs."""
        self.by: dict[tuple[str, int], dict[int, Record]] = {}
        for record in records:
            self.by.setdefault((record["row"], record["members"]), {})[record["seed"]] = record

    def has(self, *rows: str, members: int = 4) -> bool:
        """Return whether all rows were run with so many members; one member counts for `alone`."""
        return all(self._of(row, members) for row in rows)

    def _of(self, row: str, members: int) -> dict[int, Record]:
        return self.by.get((row, members)) or self.by.get((row, 1), {})

    def excess(self, row: str, base: str, *, members: int = 4) -> Interval:
        """Return by which share the loss of a row is above another's, over their common seeds."""
        a, b = self._of(row, members), self._of(base, members)
        return Interval.of([a[s]["loss"] / b[s]["loss"] - 1.0 for s in sorted(a.keys() & b.keys())])

    def peak(self, row: str, *, members: int = 4) -> int:
        """Return the bytes that a member sends in the largest round of a row."""
        return max(int(record["peak_bytes"]) for record in self._of(row, members).values())


@dataclass(frozen=True)
class Shape:
    """A claim, the rows it needs, and how it is judged."""

    claim: str
    rows: tuple[str, ...]
    judge: Callable[[Losses], tuple[bool, Mapping[str, Any]]]
    members: int = 4
    note: str = ""
    trend: tuple[tuple[str, str], ...] = ()
    """Further (row, base) whose excess says where it goes with more rounds."""


def worse(row: str, base: str, *, members: int = 4) -> Callable[[Losses], tuple[bool, Any]]:
    """Judge that a row's loss is above another's, beyond noise where that is known."""

    def judge(losses: Losses) -> tuple[bool, Any]:
        found = losses.excess(row, base, members=members)
        holds = found.mean > 0 if found.seeds < 2 else found.low > 0
        return holds, {f"{row} over {base}": found.plain()}

    return judge


def costs_less(
    share: float, rows: Sequence[str], base: str, *, members: int = 4
) -> Callable[[Losses], tuple[bool, Any]]:
    """Judge that rows cost less than a share of the base's loss."""

    def judge(losses: Losses) -> tuple[bool, Any]:
        found = {row: losses.excess(row, base, members=members) for row in rows}
        holds = all(interval.mean < share for interval in found.values())
        return holds, {f"{row} over {base}": each.plain() for row, each in found.items()}

    return judge


def ordered(rows: Sequence[str], base: str) -> Callable[[Losses], tuple[bool, Any]]:
    """Judge that the excess over a base grows along the rows."""

    def judge(losses: Losses) -> tuple[bool, Any]:
        found = {row: losses.excess(row, base) for row in rows}
        means = [interval.mean for interval in found.values()]
        return means == sorted(means), {
            f"{row} over {base}": each.plain() for row, each in found.items()
        }

    return judge


def fragments(losses: Losses) -> tuple[bool, Any]:
    """Judge that streaming costs nothing beyond noise, and its largest round is 1/F."""
    found = losses.excess("streaming", "diloco")
    share = losses.peak("streaming") / losses.peak("diloco")
    half = (found.high - found.low) / 2 if found.seeds > 1 else 0.01
    holds = abs(found.mean) <= max(half, 0.01) and share < 1.2 / FRAGMENTS
    return holds, {
        "streaming over diloco": found.plain(),
        "peak bytes, streaming / diloco": round(share, 3),
        "fragments": FRAGMENTS,
    }


SHAPES: tuple[Shape, ...] = (
    Shape(
        "one node alone is worse than DiLoCo", ("alone", "diloco"), worse("alone", "diloco")
    ),
    Shape(
        "DiLoCo is worse than data parallel in every step, at equal steps",
        ("diloco", "ddp"), worse("diloco", "ddp"),
        note="the gap closes with rounds: 2,000 steps of a smaller model end within 1 % "
        "(python -m bench.diloco)",
    ),
    Shape(
        "a warm start (averaging every 4 of the first 60 steps) brings DiLoCo closer to data "
        "parallel",
        ("diloco averaged start", "diloco cold", "ddp"),
        ordered(("diloco averaged start", "diloco cold"), "ddp"),
        note="the third figure is a start of 60 steps on the same data, which costs no bytes; it "
        "pays at higher rates and 2,000 steps (docs/measured/tuning.md)",
        trend=(("diloco", "ddp"),),
    ),
    Shape(
        "the loss grows with H: 10, 50, 200",
        ("diloco h10", "diloco h50", "diloco h200", "ddp"),
        ordered(("diloco h10", "diloco h50", "diloco h200"), "ddp"),
        note="more rounds bring DiLoCo closer to data parallel",
    ),
    Shape(
        "int8 costs less than 0.5 %",
        ("diloco/int8", "diloco"), costs_less(0.005, ["diloco/int8"], "diloco"),
    ),
    Shape(
        "int4 and e3m0 with feedback cost less than 1 %",
        ("diloco/int4", "diloco/e3m0", "diloco"),
        costs_less(0.01, ["diloco/int4", "diloco/e3m0"], "diloco"),
    ),
    Shape(
        "losing 30 % of the updates costs less than 1 %",
        ("diloco drop30", "diloco"), costs_less(0.01, ["diloco drop30"], "diloco"),
        note="the second figure says where it goes with more rounds (H = 10)",
        trend=(("diloco h10 drop30", "diloco h10"),),
    ),
    Shape(
        "streaming equals DiLoCo within noise, with 1/F of the peak bytes",
        ("streaming", "diloco"), fragments,
        note="with results taken whole (mix 0); half of the own parameters kept (mix 0.5, the "
        "paper's) is the row `streaming mix 0.5`",
    ),
    Shape(
        "asynchronous with plain Nesterov is worse than with delayed Nesterov",
        ("async plain", "async-diloco"), worse("async plain", "async-diloco"),
    ),
    Shape(
        "gossip on a ring lags the exponential graph",
        ("d-psgd ring", "d-psgd exponential"),
        worse("d-psgd ring", "d-psgd exponential", members=8), members=8,
    ),
)  # fmt: skip


def judge(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return every claim with what was found; `holds` is None where a row is missing."""
    losses = Losses(records)
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        if not losses.has(*shape.rows, members=shape.members):
            found.append(
                {"claim": shape.claim, "holds": None, "figures": {}, "note": "not measured"}
            )
            continue
        holds, figures = shape.judge(losses)
        for row, base in shape.trend:
            if losses.has(row, base, members=shape.members):
                excess = losses.excess(row, base, members=shape.members)
                figures = {**figures, f"{row} over {base}": excess.plain()}
        note = (
            shape.note if holds else f"does not come out at this scale; {shape.note}".rstrip("; ")
        )
        found.append({"claim": shape.claim, "holds": holds, "figures": dict(figures), "note": note})
    return found
