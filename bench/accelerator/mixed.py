"""One member on the accelerator, one on the processor by its owner's policy; both are killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.accelerator.job import cluster, end_of, runs, spec_for
from bench.kit.cluster import Cluster

KEEPS = 'device = "cpu"\n'
"""The policy of an owner who keeps the accelerator."""

PATIENCE_S = 90.0
FIRST_ROUNDS, BETWEEN = 3, 3
"""Rounds of both before the first member is killed, and before the second one is.

Members report a round a second at most; only those are counted.
"""


def measure(*, quick: bool) -> dict[str, Any]:
    """Return the job's end, and how long it took until a killed member was in a round again."""
    with cluster() as made:
        made.start_node("accelerated")
        made.start_node("processor", policy=KEEPS)
        made.wait_for_nodes(2)
        job = made.client.submit(spec_for(quick=quick, members=2))
        members = {}
        until(made, job, lambda: rounds_of_both(made, job) >= FIRST_ROUNDS)
        for member in made.client.job(job)["members"]:
            members[member["node"]] = member["member"]
        back = {}
        for node in ("accelerated", "processor"):
            before = rounds_of_both(made, job)
            recovered = len(recoveries(made, job))
            killed = time.monotonic()
            made.workers()[members[node]].kill()
            until(made, job, lambda n=recovered: len(recoveries(made, job)) > n)  # type: ignore[misc]
            recovery = recoveries(made, job)[-1]
            until(made, job, lambda n=before: rounds_of_both(made, job) > n)  # type: ignore[misc]
            back[node] = {
                "member": recovery["member"], "killed_after_rounds": before,
                "back_s": round(time.monotonic() - killed, 1),
                "recovered_s": round(recovery["values"]["recovered_s"], 3),
                "recovered_bytes": recovery["values"]["recovered_bytes"],
            }  # fmt: skip
            both = rounds_of_both(made, job)
            until(made, job, lambda n=both: rounds_of_both(made, job) >= n + BETWEEN)  # type: ignore[misc]
        deadline = time.monotonic() + PATIENCE_S
        while runs(made, job) and time.monotonic() < deadline:
            time.sleep(0.2)
        return {"nodes": members, "killed": back, "rounds_of_both": rounds_of_both(made, job),
                **end_of(made, job)}  # fmt: skip


def rounds_of_both(made: Cluster, job: str) -> int:
    """Return in how many committed rounds both members took part."""
    points = made.lines(job, "metrics.jsonl")
    return len({p["round"] for p in points if p["values"].get("contributors") == 2})


def recoveries(made: Cluster, job: str) -> list[dict[str, Any]]:
    """Return the points of members that took over the common state from another member."""
    return [p for p in made.lines(job, "metrics.jsonl") if "recovered_bytes" in p["values"]]


def until(made: Cluster, job: str, holds: Callable[[], bool]) -> None:
    """Wait until something holds, or the job has ended.

    Raises:
        TimeoutError: it does not come to hold.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline or not runs(made, job):
            raise TimeoutError(f"not before the end, within {PATIENCE_S:.0f} s; {noted(made, job)}")
        time.sleep(0.2)


def noted(made: Cluster, job: str) -> str:
    """Return the newest events and lines of a job's logs."""
    lines = [line["text"] for line in made.client.logs(job, tail=15)["lines"]]
    return "\n".join([*map(str, made.lines(job, "events.jsonl")[-10:]), *lines])
