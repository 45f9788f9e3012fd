"""DiPaCo on real domains at equal tokens per path: `python -m bench.dipaco [--quick]`.

One seed of one arm is a part. Parts that the file given by `--out` already has are not run again,
so a run can be interrupted, and continued with other `--seeds` or `--arms`; `--seeds` without a
number after it only reports.

One JSON object on stdout, held-out nats per byte after a prefix of 96 bytes, each with its 95 %
interval over seeds, and differences seed by seed to `dipaco` (or `dipaco_16`), routed alike:

    dense                  one model of a path's size, DiLoCo with four workers on everything
    independent            four such models without a common module, each on its shard, by AdamW
    independent_outer      the same with the outer step that the paths of dipaco have
    dipaco                 2 x 2 modules, four paths, routed once on the prefix
    dipaco_rerouted        the same paths, chosen again every 64 bytes
    dipaco_16              4 x 4 modules, sixteen paths on sixteen workers
    dipaco_by_turns        the same on four workers, each of which trains four paths by turns

Once is by the clusters that made the shards; `_fitted` is once by a router that was fitted to the
paths' losses, `_best_path` by the losses of each chunk themselves: a bound for all routers. The
last two arms are trained by the trainer itself, with members on threads; the others by loops.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.dipaco.arms import ARMS, FULL, QUICK, Seed
from bench.dipaco.corpus import collect
from bench.kit.report import emit
from bench.pooled.results import interval

DOMAINS = 4
WAYS = ("_rerouted", "_fitted", "_best_path")
"""How paths are chosen, other than once from the prefix."""


def main() -> None:
    """Run the parts that are missing, then report all that are there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seeds of a very small model")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: 1 to 5")
    parser.add_argument(
        "--domains", nargs="+", default=[], help="default: the first four there are"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", type=Path, help="keeps finished parts, one line each")
    given = parser.parse_args()
    seeds = given.seeds
    if seeds is None:
        seeds = [1, 2] if given.quick else [1, 2, 3, 4, 5]
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder, "parts.jsonl")
        plan = QUICK if given.quick else FULL
        domains = collect(
            Path(folder, "text"), given.domains, domains=DOMAINS,
            size=plan.domain_bytes, file_size=plan.file_bytes,
        )  # fmt: skip
        for seed in seeds:
            missing = [arm for arm in given.arms if (seed, arm) not in _done(out, plan)]
            if not missing:
                continue
            base = Seed(Path(folder, "text"), plan, seed)
            for arm in missing:
                began = time.monotonic()
                found = ARMS[arm](base)
                part = {
                    "seed": seed, "arm": arm, "plan": repr(plan), "losses": found,
                    "seconds": round(time.monotonic() - began, 1),
                }  # fmt: skip
                with out.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(json.dumps(part) + "\n")
                print(f"seed {seed}, {arm}: {found}", file=sys.stderr, flush=True)
        report(list(_done(out, plan).values()), domains)


def _done(out: Path, plan: Any) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the finished parts of this plan."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    parts = [part for part in map(json.loads, lines) if part["plan"] == repr(plan)]
    return {(part["seed"], part["arm"]): part for part in parts}


def compared_with(name: str) -> str:
    """Return whose loss is subtracted from that of an arm: routed alike, if it is another one's."""
    way = next((way for way in WAYS if name.endswith(way)), "")
    arm = name.removesuffix(way)
    own = "dipaco_16" if arm in ("dipaco_16", "dipaco_by_turns") else "dipaco"
    return own if arm == own else own + way


def report(parts: Sequence[dict[str, Any]], domains: Sequence[str]) -> None:
    """Print means, intervals, and paired differences to `dipaco`."""
    losses: dict[str, dict[int, float]] = {}
    for part in parts:
        for name, loss in part["losses"].items():
            losses.setdefault(name, {})[part["seed"]] = loss
    result: dict[str, Any] = {"domains": list(domains), "unit": "held-out nats per byte"}
    table = []
    for name, found in losses.items():
        over = interval(list(found.values()))
        other = compared_with(name)
        reference = losses.get(other, {})
        paired = interval([found[s] - reference[s] for s in found if s in reference] or [0.0])
        result[name] = {
            "loss": over.plain(), "minus": other, "difference": paired.plain(), "seeds": len(found)
        }  # fmt: skip
        table.append({"arm": name, "loss": over.mean, "low": over.low, "high": over.high,
                      "minus": other, "difference": paired.mean, "d_low": paired.low,
                      "d_high": paired.high, "seeds": len(found)})  # fmt: skip
    emit(result, table)


if __name__ == "__main__":
    main()
