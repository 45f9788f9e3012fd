"""What hub, queue and critic cost the actors: `python -m bench.rl.throughput [--quick]`, JSON.

The whole system is a real hub, five node agents and five workers: four actors, each in its own
environment, and the critic that learns from all of them. Against it stand four bare loops of PPO at
the same time, in four processes without any of that: the same collector, the same learner, each
with a critic of its own in the same process. Both take turns on the same cores. It reports

    ratio            environment steps/s of the system's actors / of the bare loops, all together;
                     the median over pairs, with the smallest and the largest
    ratio_cpu        the same per second of processor time, of all processes: what is left of it
                     when other programs want the cores as well
    steps_per_s      of each policy, in both
    queue_wait_s     for which actors were held up by a full queue, per second
    value_age_s      how old the newest values were that an actor had, median and p99 over points
    update_s         of one update of the critic, median
    bytes_per_step   sent by an actor, per environment step
    staleness        trajectories that the critic learned from by age: policy versions that came
                     after the one that acted
    dropped          trajectories that the critic did not learn from, by reason

How long a message takes through the hub's queue is `python -m bench.rl.queue`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from atoll.config.rl_tables import PolicyTable, RlTable
from bench.kit.cluster import Cluster
from bench.kit.report import emit
from bench.pooled.groups import DIFFERENT, Group

FOREVER = 1_000_000_000
"""Environment steps that no run reaches the end of."""
START_S, END_S = 180.0, 90.0
WARM_ROUNDS = 3
ENDS = ("done", "failed", "stopped")
Steps = dict[str, float]


@dataclasses.dataclass
class Bare:
    """What the loops came to."""

    steps_per_s: Steps
    per_cpu_s: float
    """Environment steps of all loops per second of processor time."""


# ------------------------------------------------------------------------------ bare loops


def bare(rl: RlTable, *, seconds: float) -> Bare:
    """Run a loop for each policy, all at once, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(rl.policies)), context.SimpleQueue()
    processes = [
        context.Process(target=_loop, args=(table, rl, seconds, barrier, results), daemon=True)
        for table in rl.policies
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(START_S + seconds + END_S)
    if any(process.exitcode != 0 for process in processes):
        raise RuntimeError(f"a bare loop ended with {[p.exitcode for p in processes]}")
    found = [results.get() for _ in processes]
    rates = {name: steps / passed for name, steps, passed, _ in found}
    steps = {table.name: rates[table.name] for table in rl.policies}
    return Bare(steps, sum(one[1] for one in found) / sum(one[3] for one in found))


def _loop(table: PolicyTable, rl: RlTable, seconds: float, barrier: Any, results: Any) -> None:
    """Live and learn for a while; report steps, seconds, and seconds of processor time."""
    import torch

    from atoll.rl.in_process import InProcessRun

    os.setsid()  # like a worker: where the kernel shares cores by session, shares are comparable
    torch.set_num_threads(1)
    together = InProcessRun(dataclasses.replace(rl, critic="own", policies=[table]), seed=0)
    for _ in range(WARM_ROUNDS):
        together.round()
    barrier.wait(START_S)
    before = together.curves()[0].env_steps
    began, worked = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        together.round()
    passed, worked = time.monotonic() - began, time.process_time() - worked
    results.put((table.name, together.curves()[0].env_steps - before, passed, worked))


# ------------------------------------------------------------------------------ whole system


@dataclasses.dataclass
class Observed:
    """What was seen of the whole system."""

    steps_per_s: Steps
    per_cpu_s: float
    """Environment steps per second of processor time, of hub, nodes and workers together."""
    queue_wait: float
    value_age_s: list[float]
    update_s: list[float]
    bytes_per_step: float
    staleness: Counter[str]
    dropped: Counter[str]


def system(rl: RlTable, *, seconds: float, folder: Path) -> Observed:
    """Run hub, nodes, actors and critic, and watch them for a while.

    Raises:
        TimeoutError: they do not start, or do not end.
    """
    with Cluster(folder) as cluster:
        cluster.start_hub()
        for number in range(rl.members):
            cluster.start_node(f"n{number}")
        cluster.wait_for_nodes(rl.members)
        job = cluster.client.submit(job_file(rl))
        actors = {f"w{slot}" for slot in range(1, rl.members)}
        deadline = time.monotonic() + START_S
        while not actors <= {line["member"] for line in _warm(cluster, job)}:
            if time.monotonic() > deadline or cluster.client.job(job)["state"] in ENDS:
                raise TimeoutError(f"the actors do not start: {cluster.client.job(job)}")
            time.sleep(0.5)
        since, worked, began = time.time(), processor_s(cluster), time.monotonic()
        time.sleep(seconds)
        worked, passed = processor_s(cluster) - worked, time.monotonic() - began
        lines = cluster.lines(job, "metrics.jsonl")
        cluster.client.stop(job, grace_s=30.0)
        deadline = time.monotonic() + END_S
        while (view := cluster.client.job(job))["state"] not in ENDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job does not end: {view['state']}")
            time.sleep(0.5)
    results = [member["result"]["rl"] for member in view["members"] if member["result"]]
    watched = [line for line in lines if line["time"] >= since]
    return observed(rl, watched, results, cores=worked / passed)


def processor_s(cluster: Cluster) -> float:
    """Return the processor time of everything that runs, so far."""
    worked = 0.0
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            worked += times.user + times.system
    return worked


def _warm(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """Return the points of actors that have done some updates."""
    return [
        line
        for line in cluster.lines(job, "metrics.jsonl")
        if "env_steps" in line["values"] and line["values"].get("updates", 0) >= WARM_ROUNDS
    ]


def observed(
    rl: RlTable,
    lines: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    *,
    cores: float,
) -> Observed:
    """Return the figures of a time.

    Args:
        rl: The job's tables.
        lines: Its points.
        results: What members reported at the end.
        cores: Processor time of everything, per second.
    """
    steps: Steps = {}
    waited = 0.0
    for slot, table in enumerate(rl.policies, start=1):
        points = [p for p in lines if p["member"] == f"w{slot}" and "env_steps" in p["values"]]
        if len(points) < 2:
            raise TimeoutError(
                f"policy {table.name} reported {len(points)} times; watch for longer"
            )
        first, last = points[0], points[-1]
        passed = last["time"] - first["time"]
        steps[table.name] = _growth(first, last, "env_steps") / passed
        waited += _growth(first, last, "queue_wait_s") / passed
    ages = [p["values"]["value_age_s"] for p in lines if "value_age_s" in p["values"]]
    updates = [p["values"]["update_s"] for p in lines if "update_s" in p["values"]]
    acted = [result for result in results if result["role"] == "actor"]
    staleness, dropped = Counter[str](), Counter[str]()
    for result in results:
        staleness.update(result["staleness"])
        dropped.update(result["dropped"])
    lived = sum(result["env_steps"] for result in acted)
    return Observed(
        steps_per_s=steps, per_cpu_s=sum(steps.values()) / cores,
        queue_wait=waited / len(rl.policies), value_age_s=ages,
        update_s=updates, staleness=staleness, dropped=dropped,
        bytes_per_step=sum(result["sent_bytes"] for result in acted) / max(1, lived),
    )  # fmt: skip


def _growth(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> float:
    return float(last["values"].get(name, 0.0)) - float(first["values"].get(name, 0.0))


def job_file(rl: RlTable) -> str:
    """Return the text of a job that runs until it is stopped."""
    lines = ["[job]", 'name = "throughput"', "[rl]", "record = false"]
    default = RlTable()
    for field in dataclasses.fields(rl):
        value = getattr(rl, field.name)
        if field.name not in ("policies", "record") and value != getattr(default, field.name):
            lines.append(f"{field.name} = {_toml(value)}")
    for table in rl.policies:
        lines += ["[[rl.policies]]", f'name = "{table.name}"', f'env = "{table.env}"']
        lines += [f"steps = {table.steps}"]
        pairs = ", ".join(f"{name} = {_toml(value)}" for name, value in table.options.items())
        lines += [f"options = {{ {pairs} }}"] if pairs else []
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


# ------------------------------------------------------------------------------ together


def without_end(group: Group) -> RlTable:
    """Return the tables of a group's pooled variant, whose policies never have all their steps."""
    tasks = [dataclasses.replace(task, steps=FOREVER) for task in group.tasks]
    return dataclasses.replace(group, tasks=tasks).tables("pooled")


def summarised(pairs: Sequence[tuple[Bare, Observed]]) -> dict[str, Any]:
    """Return the figures over all pairs."""
    ratios = [total(seen.steps_per_s) / total(alone.steps_per_s) for alone, seen in pairs]
    of_cpu = [seen.per_cpu_s / alone.per_cpu_s for alone, seen in pairs]
    names = list(pairs[0][0].steps_per_s)
    ages = sorted(age for _, seen in pairs for age in seen.value_age_s)
    staleness: Counter[str] = sum((seen.staleness for _, seen in pairs), Counter())
    dropped: Counter[str] = sum((seen.dropped for _, seen in pairs), Counter())
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ratio_cpu": round(statistics.median(of_cpu), 3),
        "ratio_cpu_range": [round(min(of_cpu), 3), round(max(of_cpu), 3)],
        "steps_per_cpu_s": {
            "system": round(statistics.median(seen.per_cpu_s for _, seen in pairs)),
            "bare": round(statistics.median(alone.per_cpu_s for alone, _ in pairs)),
        },
        "pairs": len(pairs),
        "steps_per_s": {
            name: {
                "system": round(statistics.median(s.steps_per_s[name] for _, s in pairs)),
                "bare": round(statistics.median(a.steps_per_s[name] for a, _ in pairs)),
            }
            for name in names
        },
        "queue_wait_s": round(statistics.median(seen.queue_wait for _, seen in pairs), 4),
        "value_age_s": {"p50": _quantile(ages, 0.5), "p99": _quantile(ages, 0.99)},
        "update_s": _quantile(sorted(u for _, seen in pairs for u in seen.update_s), 0.5),
        "bytes_per_step": round(statistics.median(s.bytes_per_step for _, s in pairs), 1),
        "staleness": dict(sorted(staleness.items(), key=lambda item: int(item[0]))),
        "dropped": dict(dropped),
    }


def total(steps: Steps) -> float:
    """Return the steps of all policies."""
    return sum(steps.values())


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    return round(values[min(len(values) - 1, int(share * len(values)))], 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one pair of 10 seconds")
    parser.add_argument("--pairs", type=int, default=0, help="5; 1 in the quick form")
    parser.add_argument("--seconds", type=float, default=0.0, help="30; 10 in the quick form")
    args = parser.parse_args()
    pairs = args.pairs or (1 if args.quick else 5)
    seconds = args.seconds or (10.0 if args.quick else 30.0)
    rl = without_end(DIFFERENT)
    found = []
    for number in range(pairs):
        alone = bare(rl, seconds=seconds)
        with tempfile.TemporaryDirectory() as folder:
            seen = system(rl, seconds=seconds, folder=Path(folder))
        found.append((alone, seen))
        sys.stderr.write(
            f"pair {number + 1}: {total(seen.steps_per_s):.0f} steps/s, bare "
            f"{total(alone.steps_per_s):.0f}; per second of processor time {seen.per_cpu_s:.0f}, "
            f"bare {alone.per_cpu_s:.0f}\n"
        )
    result = summarised(found)
    table = [
        {
            "policy": name, "system, steps/s": rates["system"], "bare, steps/s": rates["bare"],
            "ratio": rates["system"] / rates["bare"],
        }
        for name, rates in result["steps_per_s"].items()
    ]  # fmt: skip
    emit(result, table)


if __name__ == "__main__":
    main()
