"""Do policies that share completions learn more? `python -m bench.rl.sharing [--quick]`.

Four small language models with one task and one start learn by GRPO, alone or sharing as in SAPO
(`share` in [rl]). Of a batch `8/0` writes eight prompts itself, `4/4` writes four and learns from
four that the others wrote, and `4/0` writes four and learns from these only. `8/0` learns from as
much as `4/4`, `4/0` writes as much. All make as many updates. One process, one thread, fixed seeds;
every run is kept in a file as soon as it ends, so that the command can be started again.

after       mean score of the four on 256 prompts that are in no batch, sampled at temperature 1
area        mean over all updates of the score of what a policy wrote itself
difference  of both to `8/0`, paired by seed; 95 % intervals over the seeds
gain        of both by sharing: to the variant that writes as much and shares nothing
written     completions that a policy wrote in all
text_bytes  that a policy shared per update, as JSON
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from atoll.config import JobSpec, TrainTable
from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.config.tables import JobTable, ModelTable, StrategyTable
from atoll.rl.text.compatibility import check_text
from atoll.rl.text.in_process import TextInProcessRun
from atoll.rl.text.sharing import Exchange
from atoll.rl.text.start import StartModel, start_model, train_start_model
from bench.kit.report import emit
from bench.methods.ledger import Ledger
from bench.pooled.results import interval
from bench.rl.lines import rounded

POLICIES, GROUP = 4, 8
EXAMINED = 256
ALONE = "8/0"
VARIANTS = {ALONE: (8, 0), "4/0": (4, 0), "6/2": (6, 2), "4/4": (4, 4), "2/6": (2, 6)}
"""Prompts of a batch: own, and of others."""
RATE = 1e-4
"""Where `8/0` learned most on seeds 1 to 3; of 5e-4, 2e-4 and 1e-4."""
ENV, OPTIONS = "text:sums", {"most": 20, "flawed": 0.9}


def spec_of(seed: int, *, variant: str, updates: int, lr: float = RATE) -> JobSpec:
    """Return the job of one run."""
    own, share = VARIANTS[variant]
    policies = [
        PolicyTable(name=f"p{number}", env=ENV, options=OPTIONS) for number in range(POLICIES)
    ]
    rl = RlTable(
        algorithm="grpo", environments=own + share, group=GROUP, share=share, max_tokens=8,
        epochs=2, minibatches=2, lr=lr, kl=0.0, gamma=1.0,
        steps=updates * (own + share) * GROUP, policies=policies,
    )  # fmt: skip
    spec = JobSpec(
        job=JobTable(seed=seed, nodes=POLICIES),
        model=ModelTable(options={"layers": 2, "width": 64, "heads": 4, "context": 32}),
        train=TrainTable(steps=600, batch=64, lr=2e-3, warmup=50),
        strategy=StrategyTable(preset="alone"), rl=rl,
    )  # fmt: skip
    check_text(spec)
    return spec


def measure(spec: JobSpec, beginning: StartModel) -> dict[str, Any]:
    """Return how one run went."""
    together = TextInProcessRun(spec, copy.deepcopy(beginning))
    curve: list[float] = []
    before = _scores(together)
    began = time.process_time()
    while not together.done:
        together.update(on_update=lambda policy, facts: curve.append(facts["return"]))
    own = together.policies[0].write()
    text = json.dumps(Exchange(together.policies[0], task="t", seed=0).message(own))
    return {
        "before": before, "after": _scores(together), "area": statistics.mean(curve),
        "curve": [
            round(statistics.mean(curve[at : at + POLICIES]), 3)
            for at in range(0, len(curve), POLICIES)
        ],
        "written": own.steps * len(curve) // POLICIES,
        "text_bytes": len(text) if spec.rl.share else 0,
        "cpu_s": round(time.process_time() - began, 1),
    }  # fmt: skip


def _scores(together: TextInProcessRun) -> float:
    each = [policy.examine(EXAMINED, temperature=1.0)[0] for policy in together.policies]
    return statistics.mean(each)


def row_of(name: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of a variant over its seeds."""
    runs, alone = found[name], found[ALONE]
    row: dict[str, Any] = {"variant": name}
    own, share = VARIANTS[name]
    as_much = found.get(f"{own}/0", []) if share else []
    for what in ("before", "after", "area"):
        row[what] = rounded(interval([run[what] for run in runs]), digits=4)
    for what in ("after", "area"):
        pairs = zip(runs, alone, strict=True)
        by = [mine[what] - theirs[what] for mine, theirs in pairs]
        row[f"{what}_difference"] = rounded(interval(by), digits=4)
        if as_much:
            by = [mine[what] - theirs[what] for mine, theirs in zip(runs, as_much, strict=True)]
            row[f"{what}_gain"] = rounded(interval(by), digits=4)
    row |= {what: runs[0][what] for what in ("written", "text_bytes")}
    return row | {"cpu_s": round(statistics.mean(run["cpu_s"] for run in runs), 1)}


def main() -> int:
    """Measure what is not in the file yet, and report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rl.sharing", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one seed, 20 updates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[ALONE, "4/0", "4/4"])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--lr", type=float, default=RATE)
    parser.add_argument("--to", type=Path, default=Path("runs/bench_rl_sharing.jsonl"))
    args = parser.parse_args()
    seeds, updates = ([1], 20) if args.quick else (args.seeds, args.updates)
    variants = [ALONE, *(name for name in args.variants if name != ALONE)]
    torch.set_num_threads(1)
    ledger = Ledger(args.to)
    for seed in seeds:
        runs = [
            {"kind": "sharing", "row": name, "seed": seed, "steps": updates, "scale": args.lr}
            for name in variants
        ]
        missing = [run for run in runs if run not in ledger]
        if not missing:
            continue
        spec = spec_of(seed, variant=ALONE, updates=updates)
        beginning = start_model(spec)
        train_start_model(beginning, spec)
        for run in missing:
            name = str(run["row"])
            changed = spec_of(seed, variant=name, updates=updates, lr=args.lr)
            found = measure(changed, beginning)
            ledger.add(run | found)
            sys.stderr.write(f"{run | found | {'curve': ''}}\n")
    done = {(run["row"], run["seed"]): run for run in ledger if run["steps"] == updates
            and run["scale"] == args.lr}  # fmt: skip
    by_name = {name: [done[name, seed] for seed in seeds] for name in variants}
    rows = [row_of(name, by_name) for name in variants]
    result = {"rows": rows, "policies": POLICIES, "seeds": seeds, "updates": updates,
              "lr": args.lr}  # fmt: skip
    whole = dict.fromkeys(name for row in rows for name in row)
    emit(result, [{name: _shown(row.get(name, "")) for name in whole} for row in rows])
    return 0


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "{mean:.3f} ({low:.3f} to {high:.3f})".format(**value)


if __name__ == "__main__":
    sys.exit(main())
