"""Fewest bytes at data parallel's loss: `python -m bench.frontier`, JSON on stdout.

For every number of members: data parallel, by AdamW and by Muon, each at the best of `RATES`, and
methods with few bytes at equal tokens, each at the best of that rate, half and twice of it; further
rates are tried while the best is the highest or lowest. A method's figures are its held-out loss
over that of data parallel with the same optimizer and seed (`loss_gap`), over data parallel by
AdamW, and how many times fewer bytes a member sends. `best` is the method with the fewest bytes
whose mean `loss_gap` is at most `--within`.

Rates were chosen on seed 100, which has other initial values and other shards than those
reported: seeds 0, 1, 2. What has ended is kept in `--out` and not run again; `--minutes` begins no
run after that time, and reports what there is.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.clock import RealClock
from bench.kit.report import emit
from bench.methods.ledger import Ledger, Record
from bench.methods.rows import Row, named
from bench.methods.running import Trial, run
from bench.methods.setting import Setting, add_arguments, setting_of
from bench.methods.shapes import Interval
from bench.methods.together import fill

RATES = {
    "0.1M": (4e-3, 8e-3, 1.6e-2), "1M": (1.5e-3, 3e-3, 6e-3), "10M": (5e-4, 1e-3, 2e-3),
    "images": (2e-2, 4e-2, 8e-2),
}  # fmt: skip
"""Of AdamW; those of Muon are four times as high."""
CHOSEN_ON = 100
"""Seed of the choice of the rate."""
STEPS = 2000
SPARSE = {"shared_steps": 170}
DILOCO = SPARSE | {"outer_lr": 0.8, "outer_momentum": 0.75}
"""docs/measured/tuning.md."""
QUARTER, SIXTEENTH, THIRTYSECOND = (
    f"feedback:0.95(topk:{share}:4096|mean2)" for share in (0.25, 0.0625, 0.03125)
)
MUON = {"optimizer": "muon"}


def _row(name: str, codec: str, every: int, **more: Any) -> Row:
    preset = name.partition("/")[0].partition(" ")[0]
    options = (SPARSE if preset == "sparseloco" else DILOCO) | {"every": every}
    return Row(name=f"{name} h{every}", preset=preset, codec=codec, options=options, **more)


BASES = (Row(name="ddp", preset="ddp"), Row(name="ddp muon", preset="ddp", train=MUON))
ROWS: tuple[Row, ...] = (
    _row("diloco/int4", "feedback(int4)", 35),
    _row("diloco/int2", "feedback(int2)", 35),
    _row("diloco/int2", "feedback(int2)", 62),
    _row("sparseloco 1/4", QUARTER, 12),
    _row("sparseloco 1/4", QUARTER, 35),
    _row("sparseloco 1/16", SIXTEENTH, 15),
    _row("muloco/int2", "feedback(int2)", 35, train=MUON),
    _row("muloco/int2", "feedback(int2)", 62, train=MUON),
    _row("sparseloco muon 1/16", SIXTEENTH, 15, train=MUON),
    _row("sparseloco muon 1/32", THIRTYSECOND, 8, train=MUON),
)


def base_of(row: Row) -> Row:
    """Return data parallel by the same optimizer."""
    return next(base for base in BASES if base.train == row.train)


def at(setting: Setting, rate: float) -> Setting:
    """Return the setting with another rate."""
    return dataclasses.replace(setting, lr=rate)


def key_of(trial: Trial) -> Record:
    """Return what a run's record says of its trial."""
    return {
        "kind": "frontier", "row": f"{trial.row.name} @ {trial.setting.lr:g}",
        "members": trial.members, "seed": trial.seed, "steps": trial.setting.steps,
        "scale": trial.setting.scale,
    }  # fmt: skip


def once(trial: Trial) -> list[Record]:
    """Run a trial."""
    done = run(trial)
    kept = {name: done[name] for name in ("loss", "sent_bytes", "parameters", "seconds")}
    return [{**key_of(trial), **kept, "method": trial.row.name, "lr": trial.setting.lr}]


def todo(ledger: Ledger, trials: Sequence[Trial]) -> list[Trial]:
    """Return what is not in the ledger yet."""
    return [trial for trial in trials if key_of(trial) not in ledger]


def choices(setting: Setting, members: Sequence[int], rates: Sequence[float]) -> list[Trial]:
    """Return the runs by which data parallel's rates are chosen."""
    return [
        Trial(base, size, CHOSEN_ON, at(setting, rate * (4 if base.train == MUON else 1)))
        for size in members
        for base in BASES
        for rate in rates
    ]


def best_rate(ledger: Ledger, trials: Sequence[Trial]) -> float | None:
    """Return the rate with the least loss; None while not all were tried, or without any."""
    losses: dict[float, float] = {}
    for trial in trials:
        key = key_of(trial)
        if key not in ledger:
            return None
        losses[trial.setting.lr] = ledger.of(**key)[0]["loss"]
    return min(losses, key=losses.__getitem__, default=None)


def further(ledger: Ledger, trials: Sequence[Trial]) -> list[Trial]:
    """Return a trial beyond the rates that were tried, where the best is an outermost one."""
    found = []
    rows = {(trial.members, trial.row.name): trial.row for trial in trials}
    for (size, _), row in rows.items():
        mine = _of(trials, size, row)
        best = best_rate(ledger, mine)
        rates = [trial.setting.lr for trial in mine]
        if best is not None and best in (min(rates), max(rates)):
            beyond = best * 2 if best == max(rates) else best / 2
            found.append(Trial(row, size, CHOSEN_ON, at(mine[0].setting, beyond)))
    return found


def own_choices(ledger: Ledger, bases: Sequence[Trial], rows: Sequence[Row]) -> list[Trial]:
    """Return the runs by which the rates of methods are chosen, where data parallel has one."""
    return [
        Trial(row, size, CHOSEN_ON, at(bases[0].setting, rate * share))
        for size in dict.fromkeys(trial.members for trial in bases)
        for row in rows
        if (rate := best_rate(ledger, _of(bases, size, base_of(row)))) is not None
        for share in (1.0, 0.5, 2.0)
    ]


def comparison(
    ledger: Ledger, chosen: Sequence[Trial], seeds: Sequence[int], rows: Sequence[Row]
) -> list[Trial]:
    """Return the runs to compare, the first seed of all methods first."""
    return [
        Trial(row, size, seed, at(chosen[0].setting, rate))
        for seed in seeds
        for size in dict.fromkeys(trial.members for trial in chosen)
        for row in (*BASES, *rows)
        if (rate := best_rate(ledger, _of(chosen, size, row))) is not None
    ]


def _of(trials: Sequence[Trial], members: int, row: Row) -> list[Trial]:
    return [trial for trial in trials if (trial.members, trial.row) == (members, row)]


def report(ledger: Ledger, setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row per method and number of members, over the seeds that were run."""
    records = [
        r
        for r in ledger.of("frontier", steps=setting.steps, scale=setting.scale)
        if r["seed"] != CHOSEN_ON
    ]
    for size in sorted({r["members"] for r in records}):
        runs = {
            row.name: {
                r["seed"]: r for r in records if (r["members"], r["method"]) == (size, row.name)
            }
            for row in (*BASES, *ROWS)
        }
        for row in ROWS:
            mine = {base.name: runs[base.name] for base in (BASES[0], base_of(row))}
            seeds = set(runs[row.name]).intersection(*mine.values())
            if seeds:
                yield _figures(row, size, runs[row.name], mine, sorted(seeds))


def _figures(
    row: Row,
    members: int,
    of: dict[int, Record],
    bases: dict[str, dict[int, Record]],
    seeds: Sequence[int],
) -> dict[str, Any]:
    def over(base: dict[int, Record]) -> dict[str, Any]:
        return Interval.of([of[seed]["loss"] / base[seed]["loss"] - 1 for seed in seeds]).plain()

    own, first = bases[base_of(row).name], seeds[0]
    gap = over(own)
    return {
        "members": members,
        "method": row.name,
        "codec": row.codec,
        "bytes_ratio": round(own[first]["sent_bytes"] / of[first]["sent_bytes"], 1),
        "loss": round(sum(of[seed]["loss"] for seed in seeds) / len(seeds), 4),
        "loss_gap": gap["mean"],
        "interval": [gap["low"], gap["high"]],
        "over_adamw": over(bases[BASES[0].name])["mean"],
        "seeds": gap["seeds"],
        "lr": of[first]["lr"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", default="4,8,16", help="sizes of the group, with commas")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add_arguments(parser, size="0.1M")
    parser.set_defaults(steps=STEPS)
    parser.add_argument("--rows", default="", help="names of rows, with commas")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--within", type=float, default=0.01, help="share of the loss")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_frontier.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    ledger, setting = Ledger(given.out), setting_of(given)
    deadline = RealClock().monotonic() + 60 * given.minutes if given.minutes else float("inf")
    members = [int(size) for size in given.members.split(",")]
    rows = named(given.rows, ROWS)

    def run_all(trials: Sequence[Trial]) -> None:
        fill(ledger, todo(ledger, trials), once, processes=given.processes, deadline=deadline)

    def choose(trials: list[Trial]) -> list[Trial]:
        run_all(trials)
        while more := further(ledger, trials):
            run_all(more)
            trials += more
        return trials

    bases = choose(choices(setting, members, RATES[given.size]))
    own = choose(own_choices(ledger, bases, rows))
    run_all(comparison(ledger, [*bases, *own], given.seeds, rows))
    figures = list(report(ledger, setting))
    close = [row for row in figures if row["loss_gap"] <= given.within]
    best = {
        str(size): max(
            (row for row in close if row["members"] == size),
            key=lambda row: row["bytes_ratio"], default=None,
        )
        for size in members
    }  # fmt: skip
    emit(
        {
            "scale": setting.scale,
            "steps": given.steps,
            "within": given.within,
            "best": best,
            "rows": figures,
        },
        [{**row, "interval": str(row["interval"])} for row in figures],
    )


if __name__ == "__main__":
    main()
