"""Pipelines that do not wait, and small activations: `python -m bench.pipeline [--quick]`.

One JSON object on stdout. A byte-level GPT (untied, 4 layers, width 128) on the default corpus, cut
into four stages on four real ranks with one thread each, the same optimizer (NAdam), rate, seed and
batches for all rows; held-out loss after the last step.

 * `loss_gap`: loss divided by that of the synchronous pipeline with whole activations, minus 1.
 * `bytes_ratio`: bytes of whole activations and their gradients on a boundary, divided by a row's.
   Tokens are not among them: every rank of an island gets the whole batch in any case.
 * `busy`: share of its time in which a rank computes, with two ranks and two microbatches;
   `busy_counted`: the same by the order of work alone, of 20 batches.
 * `delay`: updates that the first stage's weights lack.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor

from atoll.config import MeshShape
from atoll.config.rank_environment import RankPlace
from atoll.data import BatchStream, Shards, load_dataset
from atoll.island.world import build_mesh, world
from atoll.models import GPT, GPTConfig
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.options import InnerOptions, PipelineShape
from atoll.strategies.inner.pipeline.async_steps import AsyncSteps
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate
from atoll.strategies.inner.sharded_optimizer import LocalShard
from bench.kit.report import emit

SEED, BATCH, HELD_OUT = 11, 16, 65_536
MODEL: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "context": 64, "tie": False}
LR, WARMUP = 2e-3, 20
RANKS = 4
LONGEST_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pipeline to compare."""

    name: str
    schedule: str = "1f1b"
    microbatches: int = 4
    activations: str = "none"
    lr: float = LR


ROWS = (
    Row(name="synchronous"),
    Row(name="async", schedule="async"),
    Row(name="async, 1 microbatch", schedule="async", microbatches=1),
    Row(name="int8", activations="int8"),
    Row(name="subspace", activations="subspace:4"),
    Row(name="subspace and int8", activations="subspace:16|int8"),
)


class Side:
    """One rank of a pipeline that trains as a row says."""

    def __init__(self, row: Row, *, ranks: int) -> None:
        device = torch.device("cpu")
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(**MODEL))
        options = InnerOptions(
            shape=MeshShape(pipeline=ranks), schedule=row.schedule,
            microbatches=row.microbatches, activations=row.activations,
        )  # fmt: skip
        mesh = build_mesh(options.shape, device=device)
        names = {p: name for name, p in model.named_parameters()}
        optimizer = torch.optim.NAdam(model.parameters(), lr=row.lr, betas=(0.99, 0.999))
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        parts = cast(PipelineParts, split_model(model, options, mesh=mesh, device=device))
        parts.train(True)
        self.parts = parts
        self.own = LocalShard(optimizer, parts.parameters(), groups=groups, state={})
        self.ahead = None if parts.stream is None else AsyncSteps(parts, self.own, clip=0.0)
        self.spent_s = 0.0

    def step(self, batch: tuple[Tensor, Tensor], *, rate: float) -> None:
        """Do a step, or start one."""
        if self.ahead is not None:
            self.ahead.step(*batch, rates=[rate])
            return
        self.parts.backward(*batch)
        self.spent_s += sum(self.parts.watch.spent_s.values())
        self.own.set_rates([rate])
        self.own.step()
        self.parts.constrain()

    def drain(self) -> None:
        """Finish what is in flight."""
        if self.ahead is not None:
            self.ahead.drain()
            self.spent_s += sum(self.parts.watch.spent_s.values())
            self.parts.watch.spent_s.clear()

    def loss(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Return the mean loss of batches."""
        self.drain()
        self.parts.train(False)
        return statistics.fmean(self.parts.loss(*batch).item() for batch in batches)


def trained(row: Row, *, ranks: int, steps: int) -> dict[str, float]:
    """Train on this rank; return held-out loss and bytes of a microbatch on a boundary."""
    data = load_dataset("stdlib", seed=SEED)
    stream = BatchStream(
        Shards(data.train, slots=1, context=MODEL["context"], seed=SEED), slot=0, batch=BATCH
    )
    side = Side(row, ranks=ranks)
    for step in range(steps):
        batch = next(stream)
        left = min(1.0, (step + 1) / WARMUP, 2.0 * (steps - step) / steps)
        side.step(batch, rate=row.lr * left)
    held_out = data.held_out.batches(context=MODEL["context"], batch=BATCH, limit_tokens=HELD_OUT)
    loss = side.loss(list(held_out))
    part = side.parts.boundary_bytes(batch[0]) * row.microbatches
    return {"loss": loss, "bytes_per_step": 2 * part}


def busy(row: Row, *, ranks: int, steps: int) -> dict[str, float]:
    """Return the share of this rank's time in which it computes."""
    side = Side(row, ranks=ranks)
    ids = torch.randint(256, (BATCH, MODEL["context"] + 1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for _ in range(3):
        side.step(batch, rate=0.0)
    side.drain()
    side.spent_s = 0.0
    begun = time.perf_counter()
    for _ in range(steps):
        side.step(batch, rate=0.0)
    side.drain()
    return {"busy": side.spent_s / (time.perf_counter() - begun)}


def counted(schedule: str, *, ranks: int, microbatches: int, batches: int = 20) -> float:
    """Return the busy share by the order of work; a backward pass takes twice a forward pass."""
    flushed = schedule != "async"
    times = StageTimes(forward_s=[1.0] * ranks, backward_s=[2.0] * ranks)
    number = microbatches * (1 if flushed else batches)
    played = simulate(PipelineShape(schedule, ranks), times, microbatches=number)
    return 1.0 - played.bubble


def rank_main(pipe: Connection, place: RankPlace, what: str, row: Row, steps: int) -> None:
    """Be a rank, and send what it found."""
    torch.set_num_threads(1)
    measure = trained if what == "trained" else busy
    with world(place, device=torch.device("cpu"), timeout_s=300.0):
        found = measure(row, ranks=place.ranks, steps=steps)
        torch.distributed.barrier()
    pipe.send(found)


def run(what: str, row: Row, *, ranks: int, steps: int) -> list[dict[str, float]]:
    """Return what each rank found, in fresh processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Any] = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        place = RankPlace(rank, ranks, rank, "127.0.0.1", port)
        arguments = (theirs, place, what, row, steps)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found = []
        for pipe in pipes:
            if not pipe.poll(LONGEST_S):
                raise TimeoutError(f"{row.name} took longer than {LONGEST_S:.0f} s")
            found.append(pipe.recv())
        return found
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--lr", type=float, default=LR, help="the largest learning rate")
    arguments = parser.parse_args()
    steps = 60 if arguments.quick else 240
    rows: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    for row in ROWS:
        row = replace(row, lr=arguments.lr)
        if first and arguments.only not in row.name:
            continue
        sys.stderr.write(f"{row.name} ...\n")
        found = run("trained", row, ranks=RANKS, steps=steps)[0]
        first = first or found
        shape = PipelineShape(row.schedule, RANKS)
        rows.append({
            "row": row.name,
            "loss": round(found["loss"], 4),
            "loss_gap": round(found["loss"] / first["loss"] - 1.0, 4),
            "bytes_ratio": round(first["bytes_per_step"] / found["bytes_per_step"], 1),
            "delay": shape.delay(0, microbatches=row.microbatches),
        })  # fmt: skip
    idle = []
    for name, schedule in (("synchronous", "1f1b"), ("async", "async")):
        row = Row(name=name, schedule=schedule, microbatches=2)
        ranks = run("busy", row, ranks=2, steps=steps // 4)
        idle.append({
            "row": name,
            "busy": round(statistics.fmean(one["busy"] for one in ranks), 4),
            "busy_counted": round(counted(schedule, ranks=2, microbatches=2), 4),
        })  # fmt: skip
    sys.stderr.write("\n")
    emit({"rows": rows, "busy": idle}, rows)


if __name__ == "__main__":
    main()
