"""One rank of a comparison: both sides in the same processes, taking turns."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import IslandTable, JobSpec, JobTable, ModelTable, StrategyTable, TrainTable
from atoll.config.rank_environment import RankPlace
from atoll.devices.choose import CPU
from atoll.devices.transfer import placed
from atoll.group.single import SingleGroup
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.world import build_mesh, device_of, world
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.pipeline.bubble import measure_bubble
from atoll.train.build import build, whole_model
from atoll.train.computing import options_on
from atoll.train.island.island_trainer import TrainerIsland
from bench.island.bare import bare_step
from bench.island.kinds import BATCH, CLIP, CONTEXT, LR, MODEL, Kind

BARE, BUBBLE = "bare", "bubble"


def spec_of(kind: Kind, wanted: str = CPU) -> JobSpec:
    """Return the job of a kind; in fp32 on any device, as by hand."""
    return JobSpec(
        job=JobTable(device=wanted),
        model=ModelTable(options=MODEL),
        train=TrainTable(
            steps=10**6, batch=BATCH, lr=LR, clip=CLIP, warmup=0, schedule="constant",
            precision="fp32",
        ),
        strategy=StrategyTable(preset="alone", inner=kind.inner),
        island=IslandTable(
            ranks=kind.ranks, mesh=kind.mesh, schedule=kind.schedule, vocabulary=False,
            microbatches=kind.microbatches, chunks=kind.chunks,
        ),
    )  # fmt: skip


def batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (8, BATCH, CONTEXT + 1), generator=source)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def compare(
    place: RankPlace, kind: Kind, pairs: int, segment_s: float, wanted: str = CPU
) -> dict[str, Any]:
    """Return the row of a kind on the first rank, and nothing on the others.

    `wanted` is the device as in a job.
    """
    device, spec, data = device_of(place, wanted=wanted), spec_of(kind, wanted), batches()
    with world(place, device=device, timeout_s=120.0):
        mesh = build_mesh(spec.mesh, device=device)
        broadcaster = CommandBroadcaster(rank=place.rank, ranks=place.ranks)
        island = TrainerIsland(spec, broadcaster, mesh=mesh, device=device)
        by_hand = bare_step(kind, whole_model(spec).to(device), mesh)
        there = placed(data, device)

        def bare(*, steps: int) -> float:
            return [by_hand(*there[i % len(data)]) for i in range(steps)][-1]

        broadcaster.on(BARE, bare)
        broadcaster.on(BUBBLE, lambda: bubble(spec, there[0], mesh=mesh, device=device))
        if not place.leads:
            broadcaster.serve()
            return {}
        built = build(spec, member="w0", slot=0, num_slots=1)
        island.settle(built, folder=Path())
        inner, outer, task = island.inner(), built.outer, built.task
        outer.setup(task, group=SingleGroup(), codec=built.codec)

        def ours(*, steps: int) -> float:
            return [inner.step(task, data[i % len(data)], outer).loss for i in range(steps)][-1]

        def by_command(*, steps: int) -> float:
            found: float = broadcaster.call(BARE, steps=steps)
            return found

        ours(steps=3)
        by_command(steps=3)
        steps = max(3, round(3 * segment_s / seconds_of(by_command, 3)))
        sides: dict[str, list[float]] = {"atoll": [], "bare": []}
        turns = [("atoll", ours), ("bare", by_command)]
        for _ in range(pairs):
            for name, side in turns:
                sides[name].append(seconds_of(side, steps))
            turns.reverse()
        idle = broadcaster.call(BUBBLE)
        broadcaster.end()
    tokens = steps * BATCH * CONTEXT
    ratios = [b / a for a, b in zip(sides["atoll"], sides["bare"], strict=True)]
    return {
        "inner": kind.name,
        "device": str(device),
        "mesh": str(spec.mesh),
        "ratio": round(statistics.median(ratios), 4),
        "atoll_tokens_per_s": round(tokens / statistics.median(sides["atoll"])),
        "bare_tokens_per_s": round(tokens / statistics.median(sides["bare"])),
        **idle,
        "pairs": [round(ratio, 4) for ratio in ratios],
        "steps_per_segment": steps,
    }


def bubble(
    spec: JobSpec, data: tuple[Tensor, Tensor], *, mesh: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    """Return the idle share of real steps of a pipeline; collective."""
    if mesh["pipeline"].size() == 1:
        return {"bubble": "", "bubble_expected": "", "bubble_played": ""}
    model = whole_model(spec)
    parts = split_model(model, options_on(spec, device), mesh=mesh, device=device, sample=data)
    parts.train(True)
    seen = measure_bubble(cast(Any, parts), *data, steps=7)
    return {
        "bubble": round(seen.measured, 4),
        "bubble_expected": round(seen.expected, 4),
        "bubble_played": round(seen.played, 4),
    }


def seconds_of(side: Any, steps: int) -> float:
    start = time.perf_counter()
    side(steps=steps)
    return time.perf_counter() - start
