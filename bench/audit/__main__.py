"""What verified rounds find and cost: `python -m bench.audit [--quick]`, one JSON object on stdout.

Eight members train a small GPT with DiLoCo and int8, simulated in one process: the members' steps
and digests, the checkers' steps, the handed-over files and the hub's ledger are those of a cluster,
only the network is left out. Two of them cheat in one of the ways of `members.CHEATS`, from the
first round on; every way with another choice of members and other draws (`--seeds`).

    found_rounds    rounds until both have a strike, the most of all runs; `evicted_rounds`: until
                    they are out
    false           strikes of members that do not cheat: in all those runs, and in `honest` honest
                    member-rounds that are all computed again
    overhead        seconds of the processor for digests, looks and checks, by those of the steps,
                    in a run without cheats with the interval and the batch of the preset; `later`:
                    without the checks of newcomers, as in the rounds after the first five
    loss_gap        the most by which the held-out loss at the end of a run with cheats is above
                    that of an honest run, relative; `unverified`: without checks;
                    `six_members`: of an honest run of those that are left
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.audit.honest import honest
from bench.audit.members import CHEATS, cheats_of, names
from bench.audit.simulation import MEMBERS, Outcome, Simulation, job
from bench.kit.report import emit

SHARE = 0.02
"""Share of member-rounds that are drawn by chance."""
LOSS_ROUNDS = 60


def cheating(simulation: Simulation, *, rounds: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per way to cheat and seed: when those that do it are found."""
    rows = []
    for kind in (*CHEATS, "silent", "accuse"):
        for seed in seeds:
            cheats = cheats_of(kind, 2, of=names(MEMBERS), seed=seed)
            found = simulation.run(rounds, cheats=cheats, share=SHARE, seed=seed)
            rows.append(row(kind, seed, found))
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
            sys.stderr.flush()
    return rows


def row(kind: str, seed: int, found: Outcome) -> dict[str, Any]:
    """Return what a run with cheats showed."""
    cheats = cheats_of(kind, 2, of=names(MEMBERS), seed=seed)
    first = [found.struck[name][0] + 1 for name in cheats if name in found.struck]
    out = [found.evicted[name] + 1 for name in cheats if name in found.evicted]
    return {
        "cheat": kind, "seed": seed,
        "found": len(first), "found_round": max(first, default=-1),
        "evicted": len(out), "evicted_round": max(out, default=-1),
        "false": sum(len(rounds) for name, rounds in found.struck.items() if name not in cheats),
        "checked": found.checked, "member_rounds": found.member_rounds,
    }  # fmt: skip


def losses(simulation: Simulation, *, rounds: int) -> dict[str, Any]:
    """Return held-out losses at the end of longer runs, honest and with two cheats each."""
    honest = simulation.run(rounds, share=SHARE, seed=0)
    six = simulation.run(rounds, share=SHARE, seed=0, members=MEMBERS - 2)
    found: dict[str, Any] = {"honest": round(honest.loss, 4), "six_members": round(six.loss, 4)}
    for kind in CHEATS:
        cheats = cheats_of(kind, 2, of=names(MEMBERS), seed=1)
        with_cheats = simulation.run(rounds, cheats=cheats, share=SHARE, seed=1)
        alone = simulation.run(
            rounds, cheats=cheats, share=0.0, seed=1, looked_at=False, verified=False
        )
        found[kind] = {
            "gap": round(with_cheats.loss / honest.loss - 1.0, 4),
            "unverified": round(alone.loss / honest.loss - 1.0, 4),
        }
        sys.stderr.write(json.dumps({kind: found[kind]}) + "\n")
        sys.stderr.flush()
    return found


def overhead(simulation: Simulation, *, rounds: int) -> dict[str, float]:
    """Return what verification costs in a run without cheats, by its parts."""
    found = simulation.run(rounds, share=SHARE, seed=1)
    seconds = found.seconds
    per_check = seconds.checks / max(1, found.checked)
    per_round = seconds.train / found.member_rounds
    return {
        "overhead": round(seconds.overhead, 4),
        "digests": round(seconds.digests / seconds.train, 4),
        "looks": round(seconds.looks / seconds.train, 4),
        "checks": round(seconds.checks / seconds.train, 4),
        "check_by_round": round(per_check / per_round, 3),
        "later": round(
            (seconds.digests + seconds.looks) / seconds.train + SHARE * per_check / per_round, 4
        ),
        "checked": found.checked, "member_rounds": found.member_rounds,
        "strikes": sum(map(len, found.struck.values())),
    }  # fmt: skip


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute on two cores")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every way to cheat")
    parser.add_argument(
        "--part", choices=("all", "cheats", "loss", "honest", "cost"), default="all"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of a run with cheats, or for costs")
    parser.add_argument("--honest", type=int, default=10_000, help="honest member-rounds")
    parser.add_argument("--processes", type=int, default=2, help="honest runs at a time")
    parser.add_argument("--long", type=int, default=LOSS_ROUNDS, help="rounds of a run for losses")
    parser.add_argument("--out", type=Path, help="write the result to this file, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    quick, rounds, result, rows = given.quick, given.rounds, dict[str, Any](), []
    if given.part in ("all", "cheats"):
        spec = job(every=4 if quick else 10, rounds=rounds, width=32, batch=4)
        with Simulation(spec) as small:
            rows = cheating(small, rounds=rounds, seeds=range(1, 2 if quick else given.seeds + 1))
        result |= {
            "found_rounds": max(one["found_round"] for one in rows),
            "evicted_rounds": max(one["evicted_round"] for one in rows),
            "all_found": all(one["found"] == 2 for one in rows),
            "all_evicted": all(one["evicted"] == 2 for one in rows),
            "false": sum(one["false"] for one in rows),
        }
    if given.part in ("all", "loss"):
        count = 4 if quick else given.long
        with Simulation(job(every=10, rounds=count, width=32, batch=4)) as runs:
            result["losses"] = losses(runs, rounds=count)
        gaps = [result["losses"][kind]["gap"] for kind in CHEATS]
        result["loss_gap"] = max(gaps)
    if given.part in ("all", "honest"):
        count = 200 if quick else given.honest
        result["honest"] = honest(member_rounds=count, processes=1 if quick else given.processes)
        result["false"] = result.get("false", 0) + result["honest"]["strikes"]
    if given.part in ("all", "cost"):
        with Simulation(job(every=35, rounds=rounds, width=64, batch=16)) as large:
            result["cost"] = overhead(large, rounds=3 if quick else rounds)
        result["overhead"] = result["cost"]["overhead"]
    emit(result, rows)
    if given.out is not None:
        text = json.dumps({**result, "rows": rows}, indent=1) + "\n"
        given.out.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
