"""Four policies with one value network, or with four: `python -m bench.pooled`, JSON on stdout.

Two groups of four tasks. `related`: one pole on a cart with other lengths, masses, forces and
gravities. `different`: CartPole, Acrobot, Pendulum, LunarLander. (And `related_quick_critics`, the
related ones with three times the critic's learning rate.) Four variants with the same
networks, steps, seeds and numbers: `pooled` (one critic with the policy as an input),
`own` (a critic each), `unconditioned` (one critic without that input), `sb3` (stable-baselines3's
PPO). It reports environment steps until the mean return of 20 episodes is at the task's target, and
the return at the end, with 95 % intervals over seeds.

It takes an hour or two, so it keeps what it has: every run that has ended is appended to `--out` at
once and not run again. Stop it whenever you like, and start it again with the same words.
`--minutes` begins no new run after that time and reports what there is; `--report` runs nothing at
all; `--figures` draws the curves, `--page` makes the tables of docs/measured/benchmarks.md anew.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.clock import RealClock
from bench.kit.report import emit, render
from bench.methods.ledger import Ledger
from bench.pooled.groups import GROUPS, VARIANTS, Group
from bench.pooled.learning import learn
from bench.pooled.page import with_tables
from bench.pooled.results import Found, figures, judged, printed

QUICK_STEPS = 2_048
FIRST = 5
Run = tuple[Group, str, int]


def plan(groups: Sequence[Group], variants: Sequence[str], *, seeds: int) -> Iterator[Run]:
    """Yield all runs: five seeds of every group first, all variants of one before the next one."""
    for part in (range(FIRST), range(FIRST, 1_000)):
        for group in groups:
            for seed in part:
                if seed < (seeds or group.seeds):
                    for variant in variants:
                        if variant in group.variants:
                            yield group, variant, seed


def record_of(run: Run) -> dict[str, Any]:
    """Return what makes a run that one; other settings are another run."""
    group, variant, seed = run
    return {
        "kind": f"pooled-{group.digest()}", "row": f"{group.name}/{variant}",
        "members": len(group.tasks), "seed": seed, "steps": group.steps,
    }  # fmt: skip


def fill(ledger: Ledger, runs: Iterator[Run], *, deadline: float) -> None:
    """Run what is not in the ledger yet."""
    clock = RealClock()
    for run in runs:
        record = record_of(run)
        if record in ledger:
            continue
        if clock.monotonic() > deadline:
            sys.stderr.write("time is up; the same command goes on from here\n")
            return
        group, variant, seed = run
        began, name = time.process_time(), f"{group.name}, {variant}, seed {seed}"
        try:
            curves = learn(group, variant, seed=seed)
        except Exception as error:  # the other runs are wanted all the same
            sys.stderr.write(f"{name}: FAILED: {type(error).__name__}: {error}\n")
            traceback.print_exc()
            continue
        seconds = round(time.process_time() - began, 1)
        ledger.add({**record, "curves": curves, "seconds": seconds})
        sys.stderr.write(f"{name}: {seconds:.0f} s of processor time\n")


def result_of(ledger: Ledger, groups: Sequence[Group]) -> dict[str, Any]:
    """Return what is known so far."""
    results = {}
    for group in groups:
        records = ledger.of(f"pooled-{group.digest()}", steps=group.steps)
        results[group.name] = figures(Found(group, records))
    return {
        **results,
        "claims": judged(results),
        "targets": {g.name: {t.name: t.target for t in g.tasks} for g in groups},
        "steps": {g.name: {t.name: t.steps for t in g.tasks} for g in groups},
    }


def chosen(names: str, known: Sequence[str], *, what: str) -> list[str]:
    """Return the names that were asked for, all if none.

    Raises:
        SystemExit: there is no such name.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise SystemExit(f"no {what} {name!r}; there are: {', '.join(known)}")
    return wanted or list(known)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2,048 steps per task, one seed")
    parser.add_argument("--groups", default="", help=", ".join(GROUPS))
    parser.add_argument("--variants", default="", help=", ".join(VARIANTS))
    parser.add_argument("--seeds", type=int, default=0, help="10 related, 5 of the others")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many")
    parser.add_argument("--report", action="store_true", help="run nothing, report what there is")
    parser.add_argument("--figures", type=Path, help="folder to draw the curves into")
    parser.add_argument("--page", type=Path, help="page whose tables are made anew")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench_pooled.jsonl"), help="file of finished runs"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.nice(10)
    torch.set_num_threads(1)
    groups = [GROUPS[name] for name in chosen(args.groups, list(GROUPS), what="group")]
    variants = chosen(args.variants, VARIANTS, what="variant")
    out = args.out
    if args.quick:
        groups = [group.shortened(QUICK_STEPS) for group in groups]
        out = out.with_suffix(".quick.jsonl")
        out.unlink(missing_ok=True)
    ledger, deadline = Ledger(out), float("inf")
    if args.minutes:
        deadline = RealClock().monotonic() + 60.0 * args.minutes
    if not args.report:
        fill(ledger, plan(groups, variants, seeds=args.seeds), deadline=deadline)
    result = result_of(ledger, groups)
    if args.figures:
        from bench.pooled.drawing import draw

        for group in groups:
            records = ledger.of(f"pooled-{group.digest()}", steps=group.steps)
            draw(Found(group, records), args.figures / f"pooled-{group.name}.svg")
    if args.page:
        text = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_tables(text, groups, result), encoding="utf-8")
    sys.stderr.write(render([{**c, "figures": str(c["figures"])} for c in result["claims"]]) + "\n")
    emit(result, printed(groups, result))


if __name__ == "__main__":
    main()
