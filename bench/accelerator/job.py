"""A job that says nothing of devices, from the hub to its summary."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.cli.jobs.results import results_of, write
from atoll.devices.choose import accelerator
from atoll.wire.states import JobState
from bench.kit.cluster import Cluster

SPEC = """
[job]
name = "accelerator"
nodes = {members}
threads = 4

[model]
name = "gpt"
layers = {layers}
width = {width}
heads = 4
context = {context}

[data]
corpus = "stdlib"
tokenizer = "bytes"

[train]
steps = {steps}
batch = {batch}
lr = 1e-3

[strategy]
preset = "diloco"
every = {every}
"""
LONGEST_S = 100.0


def spec_for(*, quick: bool, members: int = 1) -> str:
    """Return a job of a size for what computes here; of several members one for a processor too."""
    if not accelerator():
        size = {"layers": 1, "width": 32, "context": 32, "batch": 4, "every": 20}
        return SPEC.format(members=members, steps=200 if members == 1 else 3000, **size)
    if members > 1:
        size = {"layers": 4, "width": 128, "context": 64, "batch": 16, "every": 50}
        return SPEC.format(members=members, steps=12_000, **size)
    size = {"layers": 6, "width": 384, "context": 256, "batch": 32, "every": 50}
    return SPEC.format(members=members, steps=300 if quick else 1500, **size)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a hub."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as made:
        made.start_hub()
        yield made


def runs(made: Cluster, job: str) -> bool:
    """Return whether a job has not ended."""
    return not JobState(made.client.job(job)["state"]).ended


def end_of(made: Cluster, job: str) -> dict[str, Any]:
    """Return what a job came to: of its summary, and each member's device as its log names it."""
    view = made.client.job(job)
    summary = write(made.jobs / job, view=view, results=results_of(view))
    wanted = ("state", "reason", "loss_first", "loss_final", "tokens_per_s", "utilisation",
              "wall_s", "rounds_committed", "rounds_aborted", "replicas_identical")  # fmt: skip
    lines = made.client.logs(job, tail=2000)["lines"]
    said = [f"{line['member']}: {line['text']}" for line in lines if "computes on" in line["text"]]
    return {**{name: summary.get(name) for name in wanted}, "devices": said}


def measure(*, quick: bool) -> dict[str, Any]:
    """Return the job's end, and the node as the hub shows it while the job runs."""
    with cluster() as made:
        made.start_node("here", measure=True)
        made.wait_for_nodes(1)
        job = made.client.submit(spec_for(quick=quick))
        busy, used = [0.0], [0.0]
        node: dict[str, Any] = {}
        deadline = time.monotonic() + LONGEST_S
        while runs(made, job) and time.monotonic() < deadline:
            (node,) = made.client.nodes()
            stats = node.get("stats") or {}
            busy.append(stats.get("gpu_percent", 0.0))
            used.append(stats.get("gpu_memory_used_bytes", 0.0))
            time.sleep(0.5)
        info = node.get("info") or {}
        shown = ("gpu", "gpus", "gpu_memory_bytes", "matmul_gflops", "computes_on", "idle")
        return {
            **end_of(made, job),
            "node": {name: info.get(name) for name in shown},
            "gpu_percent_most": max(busy),
            "gpu_memory_used_bytes_most": max(used),
        }
