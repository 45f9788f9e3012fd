"""From curves to figures: steps to the target, final returns, and what variants differ by.

Everything is over seeds, with 95 % intervals of Student's t. Variants are compared seed by seed:
the ratio of steps is the geometric mean over the group's tasks, and the interval is that of its
logarithm over the seeds. A run that never reached a target counts with all its steps, which is too
few: how many those are is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.methods.ledger import Record
from bench.methods.shapes import Interval
from bench.pooled.groups import VARIANTS, Group, Task
from bench.pooled.page import cell

T_QUANTILES = {8: 2.31, 9: 2.26, 10: 2.23, 14: 2.14, 19: 2.09}
"""Degrees of freedom -> two-sided 95 % quantile, beyond those of bench.methods."""
REACHED = 0.8
"""Share of own critics' steps that a pooled critic is to need, on related tasks."""
Curve = Sequence[Sequence[Any]]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95 % interval, for any number of seeds."""
    found = Interval.of(values)
    quantile = T_QUANTILES.get(len(values) - 1)
    if quantile is None:
        return found
    half = (found.high - found.mean) * quantile / 1.96
    return Interval(found.mean, found.mean - half, found.mean + half, found.seeds)


def steps_to(target: float, curve: Curve) -> int | None:
    """Return the environment steps after which the mean return was at the target first."""
    for env_steps, mean in curve:
        if mean is not None and mean >= target:
            return int(env_steps)
    return None


def final(curve: Curve) -> float:
    """Return the mean return of the newest episodes at the end; NaN where too few have ended."""
    last = curve[-1][1] if curve else None
    return math.nan if last is None else float(last)


def area(curve: Curve) -> float:
    """Return the mean over a run of the return, one number for how early and how good."""
    known = [float(mean) for _, mean in curve if mean is not None]
    return sum(known) / len(known) if known else math.nan


class Found:
    """The runs of one group, by variant and seed."""

    def __init__(self, group: Group, records: Sequence[Record]) -> None:
        self.group = group
        self.runs: dict[str, dict[int, Record]] = {}
        for record in records:
            name, _, variant = record["row"].partition("/")
            if name == group.name:
                self.runs.setdefault(variant, {})[record["seed"]] = record

    def variants(self) -> list[str]:
        """Return the variants that have a run."""
        return [variant for variant in VARIANTS if self.runs.get(variant)]

    def needed(self, variant: str, task: Task) -> dict[int, int]:
        """Return the steps to the target by seed; those given where it was never reached."""
        return {
            seed: steps_to(task.target, run["curves"][task.name]) or task.steps
            for seed, run in self.runs[variant].items()
        }

    def missed(self, variant: str, task: Task) -> int:
        """Return how many seeds never reached the target."""
        curves = [run["curves"][task.name] for run in self.runs[variant].values()]
        return sum(steps_to(task.target, curve) is None for curve in curves)

    def of_task(self, variant: str, task: Task) -> dict[str, Any]:
        """Return the figures of one task."""
        runs = self.runs[variant].values()
        finals = [final(run["curves"][task.name]) for run in runs]
        return {
            "steps_to_target": interval(list(self.needed(variant, task).values())).plain(),
            "missed": self.missed(variant, task),
            "final_return": _plain(finals),
            "mean_return": _plain([area(r["curves"][task.name]) for r in runs]),
        }

    def ratio(self, variant: str, base: str, tasks: Sequence[Task] = ()) -> dict[str, Any]:
        """Return steps to target over another variant's, with the interval."""
        chosen = tasks or self.group.tasks
        a = {task.name: self.needed(variant, task) for task in chosen}
        b = {task.name: self.needed(base, task) for task in chosen}
        seeds = sorted(self.runs[variant].keys() & self.runs[base].keys())
        logs = [
            sum(math.log(a[t.name][s] / b[t.name][s]) for t in chosen) / len(chosen) for s in seeds
        ]
        if not logs:
            return {}
        return _exponential(interval(logs))

    def difference(self, variant: str, base: str, task: Task) -> dict[str, Any]:
        """Return how much higher the final return is, with the interval."""
        a, b = self.runs[variant], self.runs[base]
        seeds = sorted(a.keys() & b.keys())
        differences = [
            final(a[s]["curves"][task.name]) - final(b[s]["curves"][task.name]) for s in seeds
        ]
        known = [value for value in differences if math.isfinite(value)]
        return interval(known).plain() if known else {}


def figures(found: Found) -> dict[str, Any]:
    """Return everything about a group, as plain values."""
    group, out = found.group, {}
    for variant in found.variants():
        out[variant] = {
            "seeds": len(found.runs[variant]),
            "tasks": {task.name: found.of_task(variant, task) for task in group.tasks},
        }
        for base in ("own", "sb3"):
            if base != variant and base in found.variants():
                out[variant][f"steps_over_{base}"] = found.ratio(variant, base)
                out[variant][f"final_above_{base}"] = {
                    task.name: found.difference(variant, base, task) for task in group.tasks
                }
    return out


def judged(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what was to be reached, and whether it was; `holds` is None where it is unknown."""
    rows = []
    for group, when in (("related", ""), ("related_quick_critics", ", critics 3 times as quick")):
        found = _ratio(results, group, "pooled", "own")
        rows.append(
            {
                "claim": f"related{when}: pooled needs at most {REACHED} of own critics' steps",
                "holds": found["mean"] <= REACHED if found else None,
                "figures": found,
            }
        )
    pooled_different = _ratio(results, "different", "pooled", "own")
    rows.append(
        {
            "claim": "different: pooled is no worse than own critics, within noise",
            "holds": _no_worse(pooled_different),
            "figures": pooled_different,
        }
    )
    for group in ("related", "different"):
        found = _ratio(results, group, "own", "sb3")
        rows.append(
            {
                "claim": f"{group}: own critics are no worse than stable-baselines3, within noise",
                "holds": _no_worse(found),
                "figures": found,
            }
        )
    return rows


def _plain(values: Sequence[float]) -> dict[str, Any]:
    """Return the interval of the values that are known; no mean where there is none."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return {"mean": None, "low": None, "high": None, "seeds": 0}
    return interval(known).plain()


def _ratio(
    results: Mapping[str, Mapping[str, Any]], group: str, variant: str, base: str
) -> dict[str, Any]:
    found: dict[str, Any] = results.get(group, {}).get(variant, {}).get(f"steps_over_{base}", {})
    return found


def _no_worse(ratio: Mapping[str, Any]) -> bool | None:
    """Return whether a ratio of steps may be 1 or less; None: unknown."""
    if not ratio or ratio["low"] is None:
        return None
    return bool(ratio["low"] <= 1.0)


def _exponential(logs: Interval) -> dict[str, Any]:
    """Return the interval of a ratio by that of its logarithm."""
    return Interval(_exp(logs.mean), _exp(logs.low), _exp(logs.high), logs.seeds).plain()


def _exp(value: float) -> float:
    return math.exp(value) if math.isfinite(value) else value


def printed(groups: Sequence[Group], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the columns that people see."""
    rows = []
    for group in groups:
        for variant, found in results.get(group.name, {}).items():
            over = found.get("steps_over_own", {})
            for task in group.tasks:
                figures = found["tasks"][task.name]
                rows.append(
                    {
                        "group": group.name,
                        "variant": variant,
                        "task": task.name,
                        "steps to target": cell(figures["steps_to_target"], digits=0),
                        "never": f"{figures['missed']} of {found['seeds']}",
                        "final return": cell(figures["final_return"], digits=1),
                        "steps / own, all tasks": cell(over, digits=2) if over else "",
                    }
                )
    return rows
