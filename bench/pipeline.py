"""Pipelines that do not wait, and small activations: `python -m bench.pipeline [--quick]`.

One JSON object on stdout. A byte-level language model (untied, 4 layers), cut into four stages on
four real ranks with one thread each; the same optimizer, rate and batches for all rows of a seed;
held-out loss after the last step. All is deterministic, so a busy machine changes no loss.
`--alone` trains in one process, with the same boundaries inside the model, in less time; rows that
are asynchronous, and `busy`, need ranks and are left out.

 * `loss_gap`: loss divided by that of the synchronous pipeline with whole activations, minus 1;
   mean over the seeds, and `gaps` for each. `to_best`: the same against the better of the two rows
   with whole activations, which differ in the size of the embedding at the start.
 * `bytes_ratio`: bytes of whole activations and their gradients on a boundary, divided by a row's.
   Tokens are not among them: every rank of an island gets the whole batch in any case.
 * `delay`: updates that the first stage's weights lack in the mean.
 * `busy`: share of its time in which a rank computes, with two ranks and eight microbatches;
   `busy_counted`: the same by the order of work alone, of 20 batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from atoll.config import MeshShape, TrainTable
from atoll.config.rank_environment import RankPlace
from atoll.data import BatchStream, Shards, load_dataset
from atoll.island.world import build_mesh, world
from atoll.models import build_model
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.options import (
    ASYNC,
    ActivationFormat,
    InnerOptions,
    PipelineShape,
)
from atoll.strategies.inner.pipeline.activations import Activations
from atoll.strategies.inner.pipeline.async_steps import AsyncSteps
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate
from atoll.strategies.inner.pipeline.subspace import (
    SEED,
    Constraint,
    Subspace,
    TokenBoundary,
    enlarge_table,
    residual_stream,
)
from atoll.strategies.inner.sharded_optimizer import LocalShard
from atoll.train.optim.optimizers import build_optimizer
from bench.kit.ranks import on_ranks
from bench.kit.report import emit

DATA_SEED, BATCH, HELD_OUT = 11, 16, 65_536
CONTEXT, LAYERS = 64, 4
WARMUP = 20
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon", "lr": 0.02},
    "muon-nadam": {"optimizer": "muon", "lr": 0.02, "options": {"rest": "nadam"}},
    "nadam": {"optimizer": "torch:NAdam", "lr": 2e-3},
}
"""Name -> keys of `[train]`."""
RANKS = 4
CUTS = (3, 4, 5)
"""One block per rank; the embedding, the norm and the head with the nearest."""
LONGEST_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows of a run have in common."""

    model: str = "gpt"
    width: int = 64
    corpus: str = "stdlib"
    optimizer: str = "muon-nadam"
    steps: int = 240
    seed: int = 11


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pipeline to compare."""

    name: str
    schedule: str = "1f1b"
    microbatches: int = 4
    activations: str = "none"
    embedding_std: float = 0.02


PLAIN = Row(name="synchronous")
LARGE = Row(name="synchronous, embedding 0.4", embedding_std=0.4)
"""The start that a table has outside a subspace, without one: whether the start alone helps."""

WHOLE = (PLAIN.name, LARGE.name)


def rows_of(width: int) -> tuple[Row, ...]:
    """Return the rows; the subspaces are chosen for a thirtieth of the bytes."""
    few, more = width // 8, 11 * width // 64
    return (
        PLAIN,
        LARGE,
        Row(name="async, 16 microbatches", schedule=ASYNC, microbatches=16),
        Row(name="async, 4 microbatches", schedule=ASYNC),
        Row(name="int8", activations="int8"),
        Row(name=f"subspace:{few}|int8", activations=f"subspace:{few}|int8"),
        Row(name=f"subspace:{more}|int6", activations=f"subspace:{more}|int6"),
    )


def model_of(row: Row, setting: Setting) -> Any:
    """Return the model at its start."""
    torch.manual_seed(setting.seed)
    sizes = {"layers": LAYERS, "width": setting.width, "heads": 4, "context": CONTEXT}
    found = build_model(setting.model, tie=False, embedding_std=row.embedding_std, **sizes)
    size = ActivationFormat.of(row.activations).size
    if size:
        enlarge_table(found, size)
    return found


class Side:
    """One rank of a pipeline that trains as a row says."""

    def __init__(self, row: Row, setting: Setting, *, ranks: int) -> None:
        device = torch.device("cpu")
        model = model_of(row, setting)
        options = InnerOptions(
            shape=MeshShape(pipeline=ranks), schedule=row.schedule,
            microbatches=row.microbatches, activations=row.activations,
            cuts=CUTS if ranks == RANKS else (),
        )  # fmt: skip
        mesh = build_mesh(options.shape, device=device)
        names = {p: name for name, p in model.named_parameters()}
        table = TrainTable(**OPTIMIZERS[setting.optimizer])
        optimizer = build_optimizer(model, table)
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        parts = cast(PipelineParts, split_model(model, options, mesh=mesh, device=device))
        parts.train(True)
        self.parts, self.microbatches = parts, row.microbatches
        self.own = LocalShard(optimizer, parts.parameters(), groups=groups, state={})
        self.ahead = None if parts.stream is None else AsyncSteps(parts, self.own, clip=0.0)
        self.spent_s = 0.0

    def step(self, batch: tuple[Tensor, Tensor], *, share: float) -> None:
        """Do a step, or start one, with a share of the largest rates."""
        rates = [share * rate for rate in self.rates]
        if self.ahead is not None:
            self.ahead.step(*batch, rates=rates)
            return
        self.parts.backward(*batch)
        self.spent_s += sum(self.parts.watch.spent_s.values())
        self.own.set_rates(rates)
        with self.parts.stepping():
            self.own.step()

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

    def bytes_per_step(self, batch: tuple[Tensor, Tensor]) -> int:
        """Return what passes the first boundary in a step, there and back."""
        return 2 * self.parts.boundary_bytes(batch[0]) * self.microbatches


class Undivided:
    """The whole model in this process, which packs and unpacks activations where it would be cut.

    Trains as a synchronous pipeline of four ranks does, up to rounding.
    """

    def __init__(self, row: Row, setting: Setting) -> None:
        form = ActivationFormat.of(row.activations)
        self.model = model_of(row, setting)
        self.units = self.model.units()
        self.optimizer = build_optimizer(self.model, TrainTable(**OPTIMIZERS[setting.optimizer]))
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.activations = Activations(form)
        self.microbatches = row.microbatches
        self.sent = 0
        """Bytes of a step on a boundary, there and back."""
        self.constraint: Constraint | None = None
        if form.size:
            subspace = Subspace.drawn(setting.width, form.size, seed=SEED)
            table = subspace.outside(self.model.embedding.weight.detach())
            ended = {id(p) for unit in self.units[CUTS[-1] :] for p in unit.parameters()}
            named = self.model.named_parameters()
            sending = {name: p for name, p in named if id(p) not in ended}
            stream = residual_stream(self.model)
            self.constraint = Constraint.of(sending, stream, subspace, table)
            self.constraint.project()
            self.activations.boundary = TokenBoundary(subspace, table)

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, a scalar."""
        x = batch[0]
        self.activations.begin([x])
        self.activations.enter(0)
        for place, unit in enumerate(self.units):
            if place in CUTS:
                sent = self.activations.pack((x,))
                self.sent = 2 * sent[0].nbytes
                (x,) = self.activations.unpack(sent)
            x = unit(x)
        found: Tensor = self.model.criterion(x, batch[1])
        return found

    def step(self, batch: tuple[Tensor, Tensor], *, share: float) -> None:
        """Do a step with a share of the largest rates."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = share * rate
        self.optimizer.zero_grad()
        self.loss_of(batch).backward()  # type: ignore[no-untyped-call]
        if self.constraint is None:
            self.optimizer.step()
            return
        self.constraint.project_gradients()
        with self.constraint.in_coordinates():
            self.optimizer.step()

    @torch.no_grad()
    def loss(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Return the mean loss of batches."""
        self.model.train(False)
        return statistics.fmean(self.loss_of(batch).item() for batch in batches)

    def bytes_per_step(self, batch: tuple[Tensor, Tensor]) -> int:
        """Return what passes a boundary in a step, there and back."""
        rows = BATCH // self.microbatches
        self.loss_of((batch[0][:rows], batch[1][:rows]))
        return self.sent * self.microbatches


def train(side: Side | Undivided, setting: Setting) -> dict[str, float]:
    """Train; return held-out loss and bytes per step on a boundary."""
    data = load_dataset(setting.corpus, seed=DATA_SEED)
    shards = Shards(data.train, slots=1, context=CONTEXT, seed=setting.seed)
    stream = BatchStream(shards, slot=0, batch=BATCH)
    for step in range(setting.steps):
        batch = next(stream)
        ending = 2.0 * (setting.steps - step) / setting.steps
        side.step(batch, share=min(1.0, (step + 1) / WARMUP, ending))
    held_out = data.held_out.batches(context=CONTEXT, batch=BATCH, limit_tokens=HELD_OUT)
    return {"loss": side.loss(list(held_out)), "bytes_per_step": side.bytes_per_step(batch)}


def trained(place: RankPlace, row: Row, setting: Setting) -> dict[str, float]:
    """Train as one rank of a pipeline; see :func:`train`."""
    with world(place, device=torch.device("cpu"), timeout_s=300.0):
        found = train(Side(row, setting, ranks=place.ranks), setting)
        torch.distributed.barrier()
    return found


def busy(place: RankPlace, row: Row, setting: Setting) -> float:
    """Return the share of this rank's time in which it computes."""
    with world(place, device=torch.device("cpu"), timeout_s=300.0):
        side = Side(row, setting, ranks=place.ranks)
        ids = torch.randint(256, (BATCH, CONTEXT + 1))
        batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        for _ in range(3):
            side.step(batch, share=0.0)
        side.drain()
        side.spent_s = 0.0
        begun = time.perf_counter()
        for _ in range(setting.steps):
            side.step(batch, share=0.0)
        side.drain()
        found = side.spent_s / (time.perf_counter() - begun)
        torch.distributed.barrier()
    return found


def counted(schedule: str, *, ranks: int, microbatches: int, batches: int = 20) -> float:
    """Return the busy share by the order of work; a backward pass takes twice a forward pass."""
    flushed = schedule != "async"
    times = StageTimes(forward_s=[1.0] * ranks, backward_s=[2.0] * ranks)
    number = microbatches * (1 if flushed else batches)
    played = simulate(PipelineShape(schedule, ranks), times, microbatches=number)
    return 1.0 - played.bubble


def compare(
    setting: Setting, rows: Sequence[Row], seeds: list[int], *, alone: bool
) -> list[dict[str, Any]]:
    """Return what rows cost against the first one."""
    first: dict[int, dict[str, float]] = {}
    found: list[dict[str, Any]] = []
    for row in rows:
        own = {}
        for seed in seeds:
            given = replace(setting, seed=seed)
            if alone:
                own[seed] = train(Undivided(row, given), given)
            else:
                own[seed] = on_ranks(trained, row, given, ranks=RANKS, longest_s=LONGEST_S)[0]
            sys.stderr.write(f"{row.name}, seed {seed}: {own[seed]['loss']:.4f}\n")
        first = first or own
        gaps = [round(own[seed]["loss"] / first[seed]["loss"] - 1.0, 4) for seed in seeds]
        ratio = first[seeds[0]]["bytes_per_step"] / own[seeds[0]]["bytes_per_step"]
        ahead = (RANKS - 1) / row.microbatches if row.schedule == "async" else 0.0
        found.append({
            "row": row.name,
            "loss": round(statistics.fmean(one["loss"] for one in own.values()), 4),
            "losses": [round(own[seed]["loss"], 4) for seed in seeds],
            "loss_gap": round(statistics.fmean(gaps), 4),
            "gaps": gaps,
            "bytes_ratio": round(ratio, 1),
            "delay": round(ahead, 2),
        })  # fmt: skip
    best = min((one for one in found if one["row"] in WHOLE), key=lambda one: one["loss"])
    for one in found:
        pairs = zip(one["losses"], best["losses"], strict=True)
        one["to_best"] = round(statistics.fmean(loss / other - 1.0 for loss, other in pairs), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plain = Setting()
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--alone", action="store_true", help="in one process, without ranks")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--activations", help="these instead of rows, e.g. 'int8 subspace:16|int8'")
    parser.add_argument("--model", default=plain.model, help="gpt or llama")
    parser.add_argument("--width", type=int, default=plain.width)
    parser.add_argument("--corpus", default=plain.corpus, help="as in [data]")
    parser.add_argument("--optimizer", default=plain.optimizer, choices=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=plain.steps)
    parser.add_argument("--seeds", default="11", help="e.g. 11,12,13")
    arguments = parser.parse_args()
    setting = Setting(
        model=arguments.model, width=arguments.width, corpus=arguments.corpus,
        optimizer=arguments.optimizer, steps=arguments.steps // (4 if arguments.quick else 1),
    )  # fmt: skip
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    chosen = [row for row in rows_of(setting.width) if arguments.only in row.name]
    if arguments.activations is not None:
        chosen = [Row(name=spec, activations=spec) for spec in arguments.activations.split()]
    if arguments.alone:
        torch.set_num_threads(1)
        chosen = [row for row in chosen if row.schedule != ASYNC]
    chosen = [PLAIN, LARGE, *(row for row in chosen if row.name not in WHOLE)]
    rows = compare(setting, chosen, seeds, alone=arguments.alone)
    idle = []
    for schedule in () if arguments.alone else ("1f1b", ASYNC):
        row = Row(name=schedule, schedule=schedule, microbatches=8)
        ranks = on_ranks(busy, row, replace(setting, steps=setting.steps // 8), ranks=2)
        idle.append({
            "schedule": schedule,
            "busy": round(statistics.fmean(ranks), 4),
            "busy_counted": round(counted(schedule, ranks=2, microbatches=8), 4),
        })  # fmt: skip
    sys.stderr.write("\n")
    emit({"setting": asdict(setting), "seeds": seeds, "rows": rows, "busy": idle}, rows)


if __name__ == "__main__":
    main()
