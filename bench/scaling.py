"""A scaling law against a size that it has not seen: `python -m bench.scaling [--quick]`.

Small GPTs on the default corpus: sizes x tokens x members, trained with DiLoCo at equal tokens per
step of all members together. The law is fitted to all sizes but the largest, and its losses for the
largest are compared with those that were measured. One JSON object on stdout: for every run of the
largest size `predicted`, `measured`, `error` (a share of the measured loss) and `interval` (90 %).

The members are threads of this process that meet in memory; strategies, codec, data and the inner
step are the ones that workers run. `--runs FILE` keeps every finished run and does not repeat it:
the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from atoll.scaling.fit import Fit, fit
from atoll.scaling.points import Point
from atoll.scaling.predict import predict
from bench.kit.report import emit
from bench.methods.rows import Row
from bench.methods.running import Outcome, Trial, train
from bench.methods.setting import Setting

SEED = 0
VOCABULARY = 256
GOAL = 0.02
"""Largest error of a prediction for the largest size."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is varied, and what is common."""

    widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    """The last one is predicted."""
    tokens: tuple[int, ...] = (131_072, 262_144, 524_288)
    """Of all members together."""
    members: tuple[int, ...] = (1, 2, 4)
    every: tuple[int, ...] = (16,)
    batch: int = 8
    """Sequences per step of all members together."""
    context: int = 64
    layers: int = 1
    """With two, losses of such short runs cross: 2.262 at width 48, 2.208 at width 32."""
    held_out_tokens: int = 131_072

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield width, tokens, members and every of each run, the shortest first."""
        yield from sorted(
            itertools.product(self.widths, self.tokens, self.members, self.every),
            key=lambda run: (run[1], run[2], run[0]),
        )

    def trial(self, width: int, tokens: int, members: int, every: int) -> Trial:
        """Return one run.

        The learning rate follows the best of some at 131,072 tokens and one member: 0.03 at width
        16 (2.439; 0.017: 2.462), 0.012 at 32 (2.311; 0.006: 2.332), 0.003 at 48 (2.263; 0.006:
        2.294), 0.002 at 64 (2.213; 0.004: 2.232). With one rate for all, larger models end worse.
        """
        setting = Setting(
            layers=self.layers, width=width, context=self.context, batch=self.batch // members,
            steps=tokens // (self.batch * self.context), lr=8e-3 * (32 / width) ** 1.75,
            held_out_tokens=self.held_out_tokens,
        )  # fmt: skip
        options = {"every": every, "outer_lr": 0.8, "outer_momentum": 0.75, "shared_steps": 0}
        return Trial(Row(name="scaling", preset="diloco", options=options), members, SEED, setting)


QUICK = Plan(
    widths=(8, 16, 24, 32), tokens=(8_192, 16_384, 32_768), members=(1, 2), held_out_tokens=16_384
)


def measure(plan: Plan, run: tuple[int, int, int, int]) -> dict[str, Any]:
    """Train one run and return its record; for a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    outcome: Outcome = train(plan.trial(*run))[0]
    width, tokens, members, every = run
    parameters = sum(tensor.numel() for tensor in outcome.model.parameters())
    return {
        "plan": asdict(plan) | {"widths": [], "tokens": [], "members": [], "every": []},
        "run": list(run), "params": parameters - VOCABULARY * width, "tokens": tokens,
        "members": members, "every": every, "loss": outcome.loss,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def measure_all(plan: Plan, *, workers: int, kept: Path | None) -> list[dict[str, Any]]:
    """Return the records of all runs; those in `kept` are not repeated."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    same = json.loads(json.dumps(asdict(plan)))
    same |= {"widths": [], "tokens": [], "members": [], "every": []}
    if kept is not None and kept.exists():
        for line in kept.read_text("utf-8").splitlines():
            record = json.loads(line)
            if record["plan"] == same:
                known[tuple(record["run"])] = record
    todo = [run for run in plan.runs() if run not in known]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measure, plan, run) for run in todo]):
            record = done.result()
            known[tuple(record["run"])] = record
            summary = f"{record['run']} {record['loss']:.4f} in {record['seconds']} s"
            sys.stderr.write(f"{len(known)}: {summary}\n")
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    return [known[run] for run in plan.runs()]


def judge(plan: Plan, records: list[dict[str, Any]]) -> tuple[Fit, list[dict[str, Any]]]:
    """Fit the law to all sizes but the largest, and compare it with those."""
    names = ("params", "tokens", "members", "every", "loss")
    points = [Point(name=str(one["run"]), **{key: one[key] for key in names}) for one in records]
    largest = max(point.params for point in points)
    law = fit([point for point in points if point.params < largest])
    rows = []
    for point in sorted((p for p in points if p.params == largest), key=lambda p: p.tokens):
        found = predict(law, {name: point.value(name) for name in law.law.variables})
        rows.append({
            "params": int(point.params), "tokens": int(point.tokens),
            "members": int(point.members), "every": int(point.every),
            "predicted": found.loss, "measured": point.loss,
            "error": found.loss / point.loss - 1, "interval": [found.low, found.high],
        })  # fmt: skip
    return law, rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small form, in a minute")
    parser.add_argument("--runs", type=Path, help="JSON lines of finished runs, which are kept")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--every", default="", help="steps between rounds, e.g. 8,32")
    chosen = parser.parse_args()
    plan = QUICK if chosen.quick else Plan()
    if chosen.every:
        plan = Plan(**asdict(plan) | {"every": tuple(map(int, chosen.every.split(",")))})
    began = time.perf_counter()
    records = measure_all(plan, workers=chosen.workers, kept=chosen.runs)
    law, rows = judge(plan, records)
    errors = [abs(row["error"]) for row in rows]
    result = {
        "bench": "scaling", "law": law.law.equation, "constants": law.constants(),
        "fitted_runs": len(law.points), "left_out_error": law.score,
        "held_out_error_inside": law.held_out.worst_error if law.held_out else None,
        "predictions": rows, "mean_error": sum(errors) / len(errors), "worst_error": max(errors),
        "in_interval": sum(r["interval"][0] <= r["measured"] <= r["interval"][1] for r in rows),
        "goal": GOAL, "met": max(errors) <= GOAL,
        "training_s": sum(record["seconds"] for record in records),
        "wall_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    shown = [row | {"interval": "{:.3f}-{:.3f}".format(*row["interval"])} for row in rows]
    emit(result, shown)


if __name__ == "__main__":
    main()
