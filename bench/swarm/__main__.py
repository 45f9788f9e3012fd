"""How near a SWARM of real processes comes to its ideal: `python -m bench.swarm [--quick]`.

A hub and six workers of speeds 1 : 2 : 3 serve two stages. The ideal is the sum of their speeds
divided by the work. Compute is a wait of the length of a stage's pass (`stand_in.py`), because the
members share this machine's cores; everything else is the real thing.

One JSON object on stdout. As shares of the ideal: `calm`; `churn` and `churn_without_rebalancing`,
with a member killed every 20 s that its node starts again; `async_calm` and `async_churn` with
`schedule = "async"`; and `fixed_pipeline`, torch's own GPipe over processes of the same speeds
(`gpipe.py`), with the steps that it does after a process is killed, `fixed_pipeline_after_failure`.
`int8_loss_gap` and `async_loss_gap` are what int8 activations and the asynchronous schedule cost in
held-out loss at equal steps (`losses.py`), means over the rows of `losses`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.cluster import ROOT, Cluster
from bench.kit.ports import free_port
from bench.kit.report import emit
from bench.swarm import gpipe
from bench.swarm.losses import ROWS, Setting, gaps
from bench.swarm.stand_in import FORWARD_S, SLOWNESS

STAGES, MEMBERS, MICROBATCHES = 2, 6, 96
WORK = 3.5 + 2.5
"""Of a microbatch in forward passes: the first stage computes its own twice and goes back once
(1 + 1 + 1.5), the last one does both passes at once (1 + 1.5)."""
EVERY_S = 20.0
SILENT_S = 60.0
"""So long without a step, of 25 s each, and a pipeline has stopped."""
PATIENCE_S = 150.0
JOB = """
[job]
name = "{name}"
nodes = 6
min_nodes = 2
[model]
name = "bench.swarm.stand_in:tower"
context = 16
[data]
corpus = "files:{text}"
[train]
optimizer = "torch:NAdam"
steps = 1000000
batch = 96
lr = 1e-3
eval_tokens = 16
[strategy]
preset = "swarm"
[swarm]
stages = 2
microbatches = 96
codec = "int8"
rebalance_s = {rebalance_s}
schedule = "{schedule}"
"""


def ideal() -> float:
    """Return microbatches per second if no member ever waited."""
    speeds = [1 / SLOWNESS[number % len(SLOWNESS)] for number in range(MEMBERS)]
    return sum(speeds) / (WORK * FORWARD_S)


def fixed_pipeline(window_s: float) -> tuple[float, int]:
    """Return what GPipe reaches of the ideal, and its steps after a failure."""
    fixed = gpipe.Fixed(port=free_port(), stages=STAGES, members=MEMBERS, microbatches=MICROBATCHES)
    found = gpipe.measure(fixed, window_s=window_s, silent_s=SILENT_S)
    return found.per_s / ideal(), found.after_failure


def measured_losses(*, quick: bool) -> list[dict[str, Any]]:
    """Return the losses of all rows, over several seeds; not quick: of two data sets."""
    if quick:
        return gaps(Setting(steps=60), [11], ["int8", "async"])
    other = Setting(model="llama", corpus=f"files:{ROOT}/docs/**/*.md")
    return [*gaps(Setting(), [11, 12, 13], list(ROWS)), *gaps(other, [11, 12], list(ROWS))]


class Edges:
    """Watches the steps of a job."""

    def __init__(self, cluster: Cluster, job: str) -> None:
        self._cluster, self._job = cluster, job

    def step(self) -> int:
        """Return the job's step; raises RuntimeError if it has ended."""
        view = self._cluster.client.job(self._job)
        if view["state"] not in ("running", "queued", "pending", "starting"):
            raise RuntimeError(f"the job is {view['state']}: {view.get('error')}")
        return int((view["swarm"] or {}).get("step", 0))

    def wait_beyond(self, step: int, *, until: float) -> tuple[int, float] | None:
        """Return the next step and when it began; None if it does not begin in time."""
        while time.monotonic() < until:
            now = self.step()
            if now > step:
                return now, time.monotonic()
            time.sleep(0.1)
        return None


def measure(
    name: str, *, window_s: float, churn: bool, rebalance_s: float, schedule: str = "sync"
) -> float:
    """Return the share of the ideal between two beginnings of steps; 0 if no step ended."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        text = Path(folder) / "text.txt"
        words = random.Random(5)
        known = ["".join(words.choices("abcdefgh", k=5)) for _ in range(50)]
        corpus = " ".join(words.choices(known, k=12_000))
        text.write_text(corpus, encoding="utf-8", newline="\n")
        cluster.start_hub()
        cluster.start_node("n0", slots=MEMBERS)
        cluster.wait_for_nodes(1)
        spec = JOB.format(name=name, text=text, rebalance_s=rebalance_s, schedule=schedule)
        edges = Edges(cluster, cluster.client.submit(spec))
        # The second step is the first with measured speeds.
        began = edges.wait_beyond(1, until=time.monotonic() + PATIENCE_S)
        if began is None:
            raise TimeoutError("the SWARM did not begin")
        end, victim, killed_at = began[1] + window_s, 0, began[1]
        last = began
        while time.monotonic() < end:
            if churn and time.monotonic() > killed_at + EVERY_S:
                killed_at += EVERY_S
                workers = cluster.workers()
                process = workers.get(f"w{victim % MEMBERS}")
                victim += 1
                if process is not None:
                    process.kill()
            last = edges.wait_beyond(last[0], until=min(end, time.monotonic() + 0.5)) or last
        if last == began:
            return 0.0
        rate = (last[0] - began[0]) * MICROBATCHES / (last[1] - began[1])
        return rate / ideal()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter windows")
    parser.add_argument("--only", default="", help="settings whose names contain this")
    arguments = parser.parse_args()
    window_s = 80.0 if arguments.quick else 300.0
    found: dict[str, Any] = {}
    for name, churn, rebalance_s, schedule in (
        ("calm", False, 20.0, "sync"), ("churn", True, 20.0, "sync"),
        ("churn_without_rebalancing", True, 0.0, "sync"), ("async_calm", False, 20.0, "async"),
        ("async_churn", True, 20.0, "async"),
    ):  # fmt: skip
        if arguments.only in name:
            sys.stderr.write(f"{name} ...\n")
            found[name] = measure(
                name, window_s=window_s, churn=churn, rebalance_s=rebalance_s, schedule=schedule
            )
            sys.stderr.write(f"{name} {found[name]:.3f}\n")
    if arguments.only in "fixed_pipeline":
        sys.stderr.write("fixed_pipeline ...\n")
        found["fixed_pipeline"], after = fixed_pipeline(window_s)
        found["fixed_pipeline_after_failure"] = after
        sys.stderr.write(f"fixed_pipeline {found['fixed_pipeline']:.3f}\n")
    losses: list[dict[str, Any]] = []
    if arguments.only in "losses":
        sys.stderr.write("losses ...\n")
        losses = measured_losses(quick=arguments.quick)
        for name in ("int8", "async"):
            own = [row["gap"] for row in losses if row["row"] == name]
            found[f"{name}_loss_gap"] = fmean(own)
    table = [{"figure": name, "value": float(value)} for name, value in found.items()]
    emit(found | {"losses": losses}, table)


if __name__ == "__main__":
    main()
