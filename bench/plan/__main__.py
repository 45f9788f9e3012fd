"""The planner's first choice beside brute force: `python -m bench.plan`, as root on Linux.

Random labs of network namespaces: 2 to 6 machines and a hub, lines of 5 to 500 Mbit/s (up and down
apart), round trips of 0 to 200 ms, speeds 1 to 4. In each the same 12 to 14 candidates are
predicted and then run: real hub, agents and members; steps are slept, rounds are real. The planner
receives the machines as they were drawn.

picked_best       share of the labs in which the first choice is the best one that was measured
within_5_percent  share in which its measured progress is within 5 % of the best
first_not_done    labs in which the first choice was not measured to its end: they count in neither
step_error        |predicted - measured| / measured seconds per step, all candidates that exchange
bytes_error       the same of the bytes that a member sends per step

Progress is measured steps per second times what the members are worth under the method, by the same
table as in the plan: slept steps have no loss. Finished labs are kept in --out and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from atoll.forecast.predict import Forecast, Planner
from atoll.forecast.ranking import progress, rank
from atoll.netlab.lab import Lab
from bench.kit.report import emit
from bench.plan.labs import draw, tried, workload
from bench.plan.runs import Seen, routes_of, run_trials, site

CLOSE = 0.05


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def measured_progress(forecast: Forecast, seen: Seen) -> float:
    """Return the progress of a candidate as it ran."""
    return progress(forecast) * forecast.step_s / seen.step_s


def lab_of(seed: int) -> dict[str, Any]:
    """Return one lab: every candidate predicted and measured."""
    drawn = draw(seed)
    planner = Planner(workload())
    ranking = rank(planner, drawn.fleet, only=tuple(tried(drawn)))
    groups: dict[tuple[object, ...], list[tuple[int, Forecast]]] = {}
    for number, forecast in enumerate(ranking.forecasts):
        one = forecast.candidate
        if not one.alone:
            groups.setdefault((one.members, one.route), []).append((number, forecast))
    found: dict[int, Seen] = {}
    routes: list[dict[str, Any]] = []
    with site(drawn) as place:
        for index, trials in enumerate(groups.values()):
            found |= run_trials(place, drawn, trials, name=f"job{index}")
            used = routes_of(place, f"job{index}")
            routes.append({"asked": trials[0][1].candidate.route, "taken": used})
            say(f"lab {seed} {routes[-1]}")
    rows = []
    for number, forecast in enumerate(ranking.forecasts):
        if forecast.candidate.alone:  # nothing is exchanged: its steps are what they are
            found[number] = Seen(forecast.step_s, 0.0, 0)
        if number not in found:
            say(f"lab {seed} {forecast.candidate.words()}: not done")
            continue
        rows.append(row_of(forecast, found[number]))
        say(
            f"lab {seed} {rows[-1]['candidate']} x{rows[-1]['members']}: "
            f"{rows[-1]['predicted_s']:.4f} s predicted, {rows[-1]['seen_s']:.4f} seen"
        )
    return {
        "seed": seed,
        "machines": [vars_of(machine) for machine in drawn.fleet.machines],
        "rows": rows, "of_best": of_best(rows, done=0 in found),
        "not_done": len(ranking.forecasts) - len(rows), "routes": routes,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def again(lab: dict[str, Any]) -> dict[str, Any]:
    """Return a lab that was measured before, with what the planner says of it now."""
    drawn = draw(lab["seed"])
    ranking = rank(Planner(workload()), drawn.fleet, only=tuple(tried(drawn)))
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in lab["rows"]:
        measured.setdefault((row["candidate"], row["members"]), []).append(row)
    rows, done = [], []
    for forecast in ranking.forecasts:
        known = measured.get((forecast.candidate.words(), len(forecast.candidate.members)), [])
        near = min(known, key=lambda row: abs(row["predicted_s"] - forecast.step_s), default=None)
        done.append(near is not None)
        if near is None:
            continue
        known.remove(near)
        found = Seen(near["seen_s"], near["seen_bytes"], near["steps"])
        rows.append(row_of(forecast, found))
    return {**lab, "rows": rows, "of_best": of_best(rows, done=done[0])}


def of_best(rows: list[dict[str, Any]], *, done: bool) -> float | None:
    """Return the progress of the first choice, of the best; None: it is not `done`, nor a row."""
    best = max(row["seen_progress"] for row in rows)
    return round(rows[0]["seen_progress"] / best, 4) if done else None


def row_of(forecast: Forecast, found: Seen) -> dict[str, Any]:
    """Return one line of a lab."""
    return {
        "candidate": forecast.candidate.words(), "members": len(forecast.candidate.members),
        "predicted_s": round(forecast.step_s, 5), "seen_s": round(found.step_s, 5),
        "predicted_bytes": round(forecast.sent_bytes), "seen_bytes": round(found.sent_bytes),
        "steps": found.steps, "round_s": round(forecast.round_s, 4), "every": forecast.every,
        "predicted_progress": round(progress(forecast), 4),
        "seen_progress": round(measured_progress(forecast, found), 4),
    }  # fmt: skip


def vars_of(machine: Any) -> dict[str, Any]:
    names = ("name", "step_s", "up_mbps", "down_mbps", "latency_ms")
    return {name: getattr(machine, name) for name in names}


def summary(labs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all labs."""
    rows = [row for lab in labs for row in lab["rows"] if row["steps"]]
    steps = [abs(row["predicted_s"] - row["seen_s"]) / row["seen_s"] for row in rows]
    sent = [
        abs(row["predicted_bytes"] - row["seen_bytes"]) / row["seen_bytes"]
        for row in rows if row["seen_bytes"]
    ]  # fmt: skip
    chosen = [lab["of_best"] for lab in labs if lab["of_best"] is not None]
    return {
        "labs": len(labs), "candidates": len(rows), "first_not_done": len(labs) - len(chosen),
        "picked_best": _mean(one >= 1.0 for one in chosen),
        "within_5_percent": _mean(one >= 1 - CLOSE for one in chosen),
        "worst_of_best": min(chosen, default=None),
        "step_error_median": _quantile(steps, 0.5), "step_error_p90": _quantile(steps, 0.9),
        "bytes_error_median": _quantile(sent, 0.5), "bytes_error_p90": _quantile(sent, 0.9),
        "load": _mean(lab["load"] for lab in labs),
    }  # fmt: skip


def _mean(values: Any) -> float | None:
    found = list(values)
    return round(statistics.mean(found), 4) if found else None


def _quantile(values: list[float], share: float) -> float | None:
    return round(sorted(values)[int(share * (len(values) - 1))], 4) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--labs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed of the first lab")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no lab after so many")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_plan.jsonl"))
    parser.add_argument(
        "--report", action="store_true", help="run nothing: predict again what was measured"
    )
    given = parser.parse_args()
    if reason := Lab.unavailable():
        say(f"no network lab here: {reason}")
        return 1
    labs: list[dict[str, Any]] = []
    if given.out.exists():
        labs = [json.loads(line) for line in given.out.read_text("utf-8").splitlines()]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.monotonic() + (60 * given.minutes or float("inf"))
    known = {lab["seed"] for lab in labs}
    wanted = [] if given.report else range(given.first, given.first + given.labs)
    try:
        for seed in wanted:
            if seed not in known and time.monotonic() < deadline:
                labs.append(lab_of(seed))
                given.out.parent.mkdir(parents=True, exist_ok=True)
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(labs[-1]) + "\n")
    except KeyboardInterrupt:
        say("interrupted: finished labs are kept")
    if given.report:
        labs = [again(lab) for lab in labs]
    shown = [
        {"lab": lab["seed"], "of_best": lab["of_best"], "first done": lab["rows"][0]["candidate"]}
        for lab in labs
    ]
    emit({**summary(labs), "rows": labs}, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
