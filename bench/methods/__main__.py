"""Every method on one small model: `python -m bench.methods`, JSON on stdout.

A byte-level GPT of 1.0 M parameters on the default corpus, 4 and 8 members, 600 steps of 4
sequences of 64 bytes for each member: equal tokens per node for all methods. `--size` takes another
model; `--size images` a residual network on Fashion-MNIST, 16 images in a member's step, each of
which counts as a token. The members of a run are threads of one process that meet in memory;
strategies, codecs, data and the inner step are the ones that workers run. Bytes are those of the
encoded tensors that a member sends through a relay.

It takes hours, so it keeps what it has: every run that has ended is appended to `--out` at once and
not run again. Stop it whenever you like, and start it again with the same words. `--minutes` begins
no new run after that time and reports what there is; `--report` runs nothing at all.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.clock import RealClock
from atoll.devices.choose import CPU
from atoll.methods.table import METHODS, PRESETS
from bench.kit.report import emit, render
from bench.methods.ledger import Ledger
from bench.methods.modelled import Clock
from bench.methods.recording import key_of, measured, reference_of
from bench.methods.rows import Row, named
from bench.methods.running import Trial
from bench.methods.setting import Setting, add_arguments, setting_of
from bench.methods.shapes import judge
from bench.methods.table import make_rows, printed
from bench.methods.together import Work, fill

CORES = 2
"""Of a run: all its members together, of which each is one thread."""


def chosen(names: str, *, quick: bool) -> list[Row]:
    """Return the rows that were asked for.

    Raises:
        SystemExit: there is no such row.
    """
    rows = [row for row in named(names) if row.preset in PRESETS]
    return rows if names else [row for row in rows if row.quick or not quick]


def plan(
    rows: Sequence[Row], *, members: Sequence[int], seeds: int, setting: Setting
) -> Iterator[Trial]:
    """Yield all runs, most important first: a row's first size, the first seed, core rows."""
    phases: list[tuple[bool | None, range, bool]] = [
        (True, range(1), True),
        (False, range(1), True),
        (True, range(1, seeds), True),
        (None, range(1), False),
        (None, range(seeds), False),
    ]
    for core, numbers, first in phases:
        for seed in numbers:
            for row in rows:
                if core is None or row.core is core:
                    sizes = [size for size in row.members if size in {*members, 1}]
                    for size in sizes[:1] if first else sizes:
                        yield Trial(row, size, seed, setting)


def first_of_row(trial: Trial, ledger: Ledger) -> bool:
    """Return whether a row is to be compared: once, where its reference computes."""
    return trial.setting.device == CPU and reference_of(trial) not in ledger


def todo(ledger: Ledger, trials: Iterator[Trial]) -> tuple[list[Trial], Work]:
    """Return what is not in the ledger yet, and how to run it: each row is compared once."""
    left = {tuple(key_of(t).values()): t for t in trials if key_of(t) not in ledger}
    firsts = {t.row.name: t for t in reversed(left.values()) if first_of_row(t, ledger)}
    names = frozenset(trial.name for trial in firsts.values())
    return list(left.values()), functools.partial(measured, firsts=names)


def result_of(ledger: Ledger, setting: Setting, *, clock: Clock) -> dict[str, Any]:
    """Return what is known so far."""
    same = {"steps": setting.steps, "scale": setting.scale}
    records = ledger.of("run", **same)
    return {
        "rows": make_rows(
            records,
            ledger.of("reference", **same),
            clock=clock,
            walls=ledger.of("wall", route="relay", **same),
        ),
        "shapes": judge(records),
        "parameters": max((record["parameters"] for record in records), default=0),
        "scale": setting.scale,
        "steps": setting.steps,
        "tokens_per_node": setting.tokens_per_node,
        "step_s": clock.step_s,
        "round_trip_s": clock.round_trip_s,
        "runs": len(records),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rows, a smaller model, 120 steps")
    parser.add_argument("--rows", default="", help="names of rows, with commas")
    parser.add_argument("--seeds", type=int, default=0, help="3; 1 in the quick form")
    add_arguments(parser, size="1M")
    parser.add_argument("--members", default="4,8", help="sizes of the group, with commas")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many")
    parser.add_argument("--report", action="store_true", help="run nothing, report what there is")
    parser.add_argument("--step-s", type=float, default=Clock.step_s, help="seconds per step")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench_methods.jsonl"), help="file of finished runs"
    )
    return parser.parse_args()


def main() -> None:
    given = arguments()
    os.nice(19)
    if given.device == CPU:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: CORES * given.processes])
    if given.quick:
        given.size = "0.1M"
    torch.set_num_threads(1)
    setting = setting_of(given)
    members = [4] if given.quick else [int(size) for size in given.members.split(",")]
    out = given.out.with_suffix(".quick.jsonl") if given.quick else given.out
    if given.quick and out.exists():
        out.unlink()
    ledger, deadline = Ledger(out), float("inf")
    if given.minutes:
        deadline = RealClock().monotonic() + 60.0 * given.minutes
    seeds = given.seeds or (1 if given.quick else 3)
    if not given.report:
        rows = chosen(given.rows, quick=given.quick)
        for method in METHODS.values():  # now: the sources may change before the last row's turn
            importlib.import_module(method.implementation.partition(":")[0])
        trials = plan(rows, members=members, seeds=seeds, setting=setting)
        fill(ledger, *todo(ledger, trials), processes=given.processes, deadline=deadline)
    result = result_of(ledger, setting, clock=Clock(step_s=given.step_s))
    sys.stderr.write(render([{**s, "figures": ""} for s in result["shapes"]]) + "\n")
    emit(result, printed(result["rows"]))


if __name__ == "__main__":
    main()
