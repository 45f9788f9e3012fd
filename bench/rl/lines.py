"""Do slow lines and lost machines change what policies learn? `python -m bench.rl.lines`, as root.

A hub and four nodes, each in a network namespace of its own, real processes and sockets: a critic
and three policies (one physics of a cart with a pole, three poles). Three conditions, the same
seeds in each:

free    no limit on any line.
slow    every node's line has 20 Mbit/s each way and 80 ms round trip.
killed  slow, and when half of the steps are done the process of an actor and that of the critic are
        killed; they come back and go on from their saved states.

For each: `curve`, the mean return of the policies at eight places of the run (over environment
steps, not seconds), with 95 % intervals over the seeds; `final`, the return at the end; `area`, the
mean of the curve; `difference`, area minus that of `free`, paired by seed; how old the critics were
by which experience was judged; how long actors waited for room in their queues; bytes per step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from bench.kit.report import emit
from bench.methods.shapes import Interval
from bench.pooled.results import interval
from bench.slowlink import HUB, Site, say

RATE, RTT = "20mbit", "80ms"
NODES, PLACES = 4, 8
CONDITIONS = ("free", "slow", "killed")
JOB = """
[job]
name = "lines"
seed = {seed}
[rl]
steps = {steps}
rollout = 32
gae_lambda = 0.9
record = false
save_every = 10
"""
POLICY = """
[[rl.policies]]
name = "{name}"
env = "atoll.rl.environments.physics:cartpole"
options = {{length = {length}}}
"""
LENGTHS = {"short": 0.3, "middle": 0.5, "long": 0.9}
ENDS_S = 400.0


@contextmanager
def site(*, slow: bool) -> Iterator[Site]:
    """Give a hub and four nodes, behind slow lines or not."""
    line = {"rate": RATE, "rtt": RTT} if slow else {}
    with (
        tempfile.TemporaryDirectory(prefix="rl-lines-", ignore_cleanup_errors=True) as folder,
        Lab(hosts=NODES + 1, **line) as lab,
    ):
        if slow:  # half of the round trip stays, so that from node to hub and back it is the whole
            lab.shape(HUB, Shape(rtt_s=lab.shape_of(1).rtt_s))
        made = Site(Path(folder), lab)
        try:
            made.gather()
            yield made
        finally:
            made.close()


def run_once(place: Site, *, seed: int, steps: int, killed: bool) -> dict[str, Any]:
    """Run a job to its end; return its measurements and its summary.

    Raises:
        RuntimeError: it did not end well.
    """
    runs = place.folder / f"runs-{seed}"
    path = place.folder / f"{seed}.toml"
    policies = [POLICY.format(name=name, length=length) for name, length in LENGTHS.items()]
    path.write_text(JOB.format(seed=seed, steps=steps) + "".join(policies), encoding="utf-8")
    job = place.start(HUB, "run", str(path), "--runs", str(runs))
    deadline = time.monotonic() + ENDS_S
    while job.poll() is None and time.monotonic() < deadline:
        if killed and furthest(runs) > steps // 2:
            killed = False
            kill("w0", "w1")
        time.sleep(0.2)
    if job.poll() != 0:
        log = (place.folder / f"host{HUB}.log").read_text(encoding="utf-8")
        raise RuntimeError(f"the job did not end well: {log[-2000:]}")
    (folder,) = [found for found in runs.iterdir() if (found / "summary.json").exists()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {"points": points_of(folder), **summary["rl"]}


def points_of(folder: Path) -> list[dict[str, Any]]:
    """Return what was measured so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def furthest(runs: Path) -> float:
    """Return the environment steps that the slowest actor has reported."""
    found = {f"w{slot + 1}": 0.0 for slot in range(len(LENGTHS))}
    for folder in runs.glob("lines-*"):
        for point in points_of(folder):
            if point["member"] in found:
                found[point["member"]] = point["values"].get("env_steps", 0.0)
    return min(found.values())


def kill(*members: str) -> None:
    """Kill the processes of members of the only job."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        ours = environment.get("ATOLL_JOB", "").startswith("lines-")
        if ours and environment.get("ATOLL_MEMBER") in members:
            os.kill(process.pid, signal.SIGKILL)


def curve_of(points: Sequence[dict[str, Any]], *, steps: int) -> list[float]:
    """Return the mean return of the policies at each place of the run."""
    curves = []
    for slot in range(1, len(LENGTHS) + 1):
        mine = sorted(
            (p["values"]["env_steps"], p["values"]["return"])
            for p in points
            if p["member"] == f"w{slot}" and "return" in p["values"]
        )
        curves.append([at(mine, steps * (n + 1) / PLACES) for n in range(PLACES)])
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


def at(curve: Sequence[tuple[float, float]], steps: float) -> float:
    """Return a curve's value at a number of steps, by the line between its neighbours."""
    before = [point for point in curve if point[0] <= steps]
    after = [point for point in curve if point[0] > steps]
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (steps - x0) / (x1 - x0)


def row_of(found: Sequence[dict[str, Any]], *, steps: int) -> dict[str, Any]:
    """Return one condition's figures from its runs, one for each seed."""
    curves = [curve_of(run["points"], steps=steps) for run in found]
    actors = [one for run in found for one in run["policies"]]
    critics = [run["critic_member"] for run in found]
    ages = [(int(age), n) for one in critics for age, n in one["staleness"].items()]
    lived = sum(one["env_steps"] for one in actors)
    return {
        "curve": [rounded(interval(values)) for values in zip(*curves, strict=True)],
        "final": rounded(interval([curve[-1] for curve in curves])),
        "area": rounded(interval([statistics.mean(curve) for curve in curves])),
        "areas": [round(statistics.mean(curve), 2) for curve in curves],
        "staleness_mean": round(sum(a * n for a, n in ages) / max(1, sum(n for _, n in ages)), 3),
        "staleness_most": max((age for age, n in ages if n), default=0),
        "queue_wait_s": round(statistics.mean(one["queue_wait_s"] for one in actors), 2),
        "bytes_per_step": round(sum(one["sent_bytes"] for one in actors) / lived, 1),
        "not_learned": sum(sum(one["dropped"].values()) for one in critics),
    }


def rounded(found: Interval, *, digits: int = 2) -> dict[str, float | None]:
    """Return a mean and its interval as plain numbers; one seed has no interval."""
    values = {name: float(getattr(found, name)) for name in ("mean", "low", "high")}
    return {
        name: round(value, digits) if math.isfinite(value) else None
        for name, value in values.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rl.lines", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30_000)
    args = parser.parse_args()
    if reason := Lab.unavailable():
        say(f"no network lab here: {reason}")
        return 1
    seeds, steps = (1, 6_000) if args.quick else (args.seeds, args.steps)
    began, rows = time.monotonic(), dict[str, dict[str, Any]]()
    for condition in CONDITIONS:
        with site(slow=condition != "free") as place:
            found = []
            for seed in range(1, seeds + 1):
                killed = condition == "killed"
                found.append(run_once(place, seed=seed, steps=steps, killed=killed))
                say(f"{condition}, seed {seed}: {time.monotonic() - began:.0f} s")
            rows[condition] = row_of(found, steps=steps)
    for row in rows.values():
        pairs = zip(row["areas"], rows["free"]["areas"], strict=True)
        row["difference"] = rounded(interval([one - other for one, other in pairs]))
    result = {
        "rows": rows, "rate": RATE, "rtt": RTT, "seeds": seeds, "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    emit(result, [{"condition": name, **table_row(row)} for name, row in rows.items()])
    return 0


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return what people read of a condition."""
    shown = {name: str(row[name]) for name in ("final", "area", "difference")}
    return shown | {k: v for k, v in row.items() if k not in ("curve", "areas", *shown)}


if __name__ == "__main__":
    sys.exit(main())
