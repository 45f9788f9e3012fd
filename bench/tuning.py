"""Chooses the methods' defaults: `python -m bench.tuning PLAN [--out FILE]`, JSON on stdout.

A plan names presets, candidates for their options, and workloads: size of the model, rounds,
members, even shards or shards of different kinds of text. Every cell of the plan is one run with
fixed delays, which repeats itself bit for bit. `excess` is the held-out loss over that of DiLoCo's
preset in the same workload with the same seed, at equal steps; fp32 unless the name has a codec.

The workloads of `held-out` (other text, another architecture) and `images` (Fashion-MNIST, a
residual network) are for reports: nothing is chosen on them. Every finished run is appended to
`--out` at once and not repeated. `--share 0/2` runs one half of the cells, for several processes
with files of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kit.report import emit
from bench.methods.ledger import Ledger
from bench.methods.rows import Row
from bench.methods.running import Trial, run
from bench.methods.setting import IMAGES, Setting

HEADERS = f"files:{Path(torch.__file__).parent}/include/ATen/**/*.h"
"""Text of another kind than the standard library's: C++."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A setting with a number of rounds and members."""

    name: str
    setting: Setting
    rounds: int
    members: int

    @property
    def every(self) -> int:
        """Steps between two rounds."""
        return max(1, self.setting.steps // self.rounds)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Candidates and the workloads that they are compared on."""

    candidates: tuple[Row, ...]
    workloads: tuple[Workload, ...]


SMALL = Setting(layers=2, width=64, batch=4, steps=180, lr=6e-3, held_out_tokens=32_768)
MIDDLE = Setting(layers=5, width=128, batch=2, steps=180, lr=3e-3, held_out_tokens=32_768)
OTHER: dict[str, Any] = {"data": HEADERS, "name": "llama"}


def workloads(
    base: Setting, word: str, *, rounds: Sequence[int], members: Sequence[int],
    orders: Sequence[str] = ("shuffled", "contiguous"), **changes: Any,
) -> Iterator[Workload]:  # fmt: skip
    """Yield the workloads of one size."""
    for count, size, order in itertools.product(rounds, members, orders):
        kind = "even" if order == "shuffled" else "uneven"
        setting = Setting(**{**vars(base), **changes, "order": order})
        yield Workload(
            name=f"{word} r{count} m{size} {kind}", setting=setting, rounds=count, members=size
        )


def of(preset: str, codec: str = "fp32", **options: Any) -> Row:
    """Return a candidate, named by codec and options; `every` is the workload's."""
    words = " ".join(f"{name}={value}" for name, value in options.items())
    name = f"{preset}/{codec}" if codec != "fp32" else preset
    return Row(name=f"{name} {words}".strip(), preset=preset, codec=codec, options=options)


BASE = of("diloco", shared_steps=170, outer_lr=0.8, outer_momentum=0.75)
TUNED = of("diloco", shared_steps=170, outer_lr=0.7, outer_momentum=0.5)
"""What the preset takes in short runs."""


def streaming() -> Plan:
    """Outer step and mix of Streaming DiLoCo, at a short and a long delay."""
    settings = [
        (0.7, 0.5, 0.0), (0.8, 0.75, 0.0), (1.0, 0.5, 0.0), (0.8, 0.75, 0.5),
    ]  # fmt: skip
    found = [
        of("streaming-diloco", shared_steps=170, outer_lr=lr, outer_momentum=mu, mix=mix)
        for lr, mu, mix in settings
    ]
    return Plan(candidates=(BASE, *found), workloads=TUNING)


def eager() -> Plan:
    """Outer step of eager DiLoCo."""
    pairs = [(0.7, 0.0), (0.4, 0.5), (0.5, 0.25), (1.0, 0.0)]
    found = [
        of("eager-diloco", shared_steps=170, outer_lr=lr, outer_momentum=mu) for lr, mu in pairs
    ]
    return Plan(candidates=(BASE, *found), workloads=TUNING)


def diloco() -> Plan:
    """Outer step of DiLoCo against the number of rounds and members."""
    pairs = [(0.7, 0.5), (0.7, 0.9), (1.0, 0.5), (1.0, 0.0)]
    found = [of("diloco", shared_steps=170, outer_lr=lr, outer_momentum=mu) for lr, mu in pairs]
    return Plan(candidates=(BASE, *found), workloads=TUNING)


def few() -> Plan:
    """Outer step of DiLoCo in few rounds, on text and on pictures."""
    pairs = [(0.7, 0.5), (0.8, 0.6), (0.8, 0.5), (0.9, 0.5), (1.0, 0.5), (0.9, 0.65)]
    found = [of("diloco", shared_steps=170, outer_lr=lr, outer_momentum=mu) for lr, mu in pairs]
    return Plan(candidates=(BASE, *found), workloads=FEW)


def few_held_out() -> Plan:
    """What `few` would choose, on workloads that nothing is chosen on."""
    chosen = of("diloco", shared_steps=170, outer_lr=0.8, outer_momentum=0.6)
    return Plan(
        candidates=(TUNED, chosen),
        workloads=(*HELD_OUT, *workloads(IMAGES, "images", rounds=(20,), members=(4,))),
    )


def asynchronous() -> Plan:
    """Outer step of asynchronous DiLoCo, without measured speeds."""
    found = [
        of("async-diloco", outer_lr=lr, outer_momentum=mu, dynamic=False, outer_optimizer=kind)
        for lr, mu, kind in (
            (0.7, 0.5, "delayed-nesterov"), (0.25, 0.0, "sgd"), (0.5, 0.0, "sgd"),
            (0.7, 0.9, "delayed-nesterov"), (1.0, 0.3, "delayed-nesterov"),
        )
    ]  # fmt: skip
    return Plan(candidates=(BASE, *found), workloads=TUNING)


def late() -> Plan:
    """Asynchronous DiLoCo with look-ahead and with regions, where updates are three late."""
    found = [
        of("async-diloco", dynamic=False),
        of("async-look-ahead", dynamic=False),
        of("async-look-ahead", dynamic=False, look_ahead=0.5),
        of("halos", dynamic=False, merge_every=4),
        of("halos", dynamic=False, merge_every=4, mix=0.25, outer_lr=0.7),
    ]  # fmt: skip
    return Plan(candidates=(TUNED, *found), workloads=LATE)


def decoupled() -> Plan:
    """Outer step of Decoupled DiLoCo, whose merged updates are as long as members' own."""
    pairs = [(0.4, 0.9), (0.35, 0.5), (0.5, 0.5), (0.7, 0.0)]
    found = [
        of("decoupled-diloco", shared_steps=170, outer_lr=lr, outer_momentum=mu, grace=0)
        for lr, mu in pairs
    ]
    return Plan(candidates=(BASE, *found), workloads=TUNING[:3])


TUNING = (
    *workloads(SMALL, "0.1M", rounds=(10, 3), members=(4,), orders=("shuffled",)),
    *workloads(SMALL, "0.1M", rounds=(30,), members=(4,), orders=("contiguous",)),
    *workloads(SMALL, "0.1M", rounds=(10,), members=(2, 8), orders=("shuffled",)),
    *workloads(MIDDLE, "1M", rounds=(6,), members=(4,), orders=("contiguous",)),
)  # fmt: skip
FEW = (
    *workloads(IMAGES, "images", rounds=(8, 30), members=(4,), orders=("shuffled",)),
    *workloads(SMALL, "0.1M", rounds=(8, 20), members=(4,)),
    *workloads(MIDDLE, "1M", rounds=(20,), members=(4,), orders=("shuffled",)),
)  # fmt: skip
HELD_OUT = (
    *workloads(SMALL, "other 0.1M", rounds=(8,), members=(4,), **OTHER),
    *workloads(MIDDLE, "other 1M", rounds=(20,), members=(4,), orders=("shuffled",), **OTHER),
)  # fmt: skip
TINY = Setting(layers=1, width=32, context=32, batch=4, steps=160, lr=1e-2, held_out_tokens=16_384)
LATE = (
    *workloads(TINY, "tiny", rounds=(10,), members=(4,), orders=("shuffled",)),
    *workloads(
        TINY, "tiny slow", rounds=(10,), members=(4,), orders=("shuffled",),
        speeds=(1.0, 1.0, 0.5, 0.5),
    ),
    *workloads(SMALL, "other 0.1M", rounds=(8,), members=(4,), orders=("shuffled",), **OTHER),
)  # fmt: skip
"""In the second, two members are half as fast and do a third of the steps."""


def own_settings(*found: Workload) -> Plan:
    """What the presets' own settings come to on workloads that they were not chosen on."""
    presets = [
        of("streaming-diloco"), of("eager-diloco"), of("async-diloco", dynamic=False),
        of("sparseloco", "feedback:0.95(topk:0.0625:4096|mean2)"), of("des-loc"), of("mt-dao"),
        of("decoupled-diloco", grace=0), of("local-sgd"),
        dataclasses.replace(of("muloco", "feedback(int2)"), train={"optimizer": "muon"}),
        *(
            dataclasses.replace(TUNED, name=f"diloco/{codec}", codec=codec)
            for codec in ("feedback(sign)", "feedback(topk:0.05|int8)", "feedback(int4)")
        ),
    ]  # fmt: skip
    return Plan(candidates=(BASE, TUNED, *presets), workloads=found)


def held_out() -> Plan:
    """Presets on other text and another architecture."""
    return own_settings(*HELD_OUT)


def images() -> Plan:
    """Presets on pictures, and where every member has a few classes only."""
    return own_settings(*workloads(IMAGES, "images", rounds=(20,), members=(4,)))


PLANS = {
    "held-out": held_out, "images": images, "streaming": streaming, "eager": eager,
    "diloco": diloco, "few": few, "few-held-out": few_held_out,
    "async": asynchronous, "decoupled": decoupled, "late": late,
}  # fmt: skip


MORE_ROUNDS = {"sparseloco": 3}
"""Rounds for each one of `diloco`, as the presets have them: short ones."""


def trial(row: Row, work: Workload, seed: int) -> Trial:
    """Return the run of a cell."""
    options = {"every": max(1, work.every // MORE_ROUNDS.get(row.preset, 1)), **row.options}
    if row.preset in ("streaming-diloco", "decoupled-diloco"):
        options = {"fragments": min(4, work.every), "delay": delay_in(work), **options}
    cell = Row(
        name=f"{work.name}: {row.name}", preset=row.preset, codec=row.codec, options=options,
        train=row.train,
    )  # fmt: skip
    return Trial(cell, work.members, seed, work.setting)


def delay_in(work: Workload) -> int:
    """Return half of the steps between two rounds of fragments."""
    gap = work.every // min(4, work.every)
    return gap // 2


def fill(ledger: Ledger, plan: Plan, *, share: tuple[int, int], seeds: int) -> None:
    """Run the cells that are not in the ledger yet: seed by seed, workload by workload."""
    cells = list(itertools.product(range(seeds), plan.workloads, plan.candidates))
    for index, (seed, work, row) in enumerate(cells):
        each = trial(row, work, seed)
        record = {
            "kind": "run", "row": each.row.name, "members": work.members, "seed": seed,
            "steps": work.setting.steps,
        }  # fmt: skip
        if index % share[1] != share[0] or record in ledger:
            continue
        done = run(each)
        ledger.add({**done, **record, "workload": work.name, "candidate": row.name})
        sys.stderr.write(f"{each.row.name}: {done['loss']:.4f} in {done['seconds']:.0f} s\n")


def excesses(records: Sequence[Mapping[str, Any]], *, over: str) -> list[dict[str, Any]]:
    """Return each candidate's excess over another: by workload, each seed's; mean, largest."""
    bases = {(r["workload"], r["seed"]): r["loss"] for r in records if r["candidate"] == over}
    by: dict[str, dict[str, list[float]]] = {}
    for record in records:
        base = bases.get((record["workload"], record["seed"]))
        if base is not None:
            found = by.setdefault(record["candidate"], {})
            found.setdefault(record["workload"], []).append(round(record["loss"] / base - 1.0, 4))
    rows = [
        {
            "candidate": name, "workloads": len(found),
            "mean": round(statistics.fmean(map(statistics.fmean, found.values())), 4),
            "largest": max(itertools.chain.from_iterable(found.values())), "by_workload": found,
        }
        for name, found in by.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: float(row["mean"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", choices=sorted(PLANS))
    parser.add_argument("--out", type=Path, default=Path("runs/tuning.jsonl"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--share", default="0/1", help="which part of the cells, e.g. 0/2")
    parser.add_argument("--over", default=BASE.name, help="the candidate to compare with")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    os.nice(5)
    torch.set_num_threads(1)
    part, _, parts = given.share.partition("/")
    ledger, plan = Ledger(given.out), PLANS[given.plan]()
    if not given.report:
        fill(ledger, plan, share=(int(part), int(parts)), seeds=given.seeds)
    known = {row.name for row in plan.candidates}
    rows = excesses([r for r in ledger if r.get("candidate") in known], over=given.over)
    table = [{k: v for k, v in row.items() if k != "by_workload"} for row in rows]
    emit({"plan": given.plan, "rows": rows}, table)


if __name__ == "__main__":
    main()
