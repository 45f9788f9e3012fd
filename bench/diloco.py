"""DiLoCo against its yardsticks: `python -m bench.diloco [--quick]`, one JSON object on stdout.

A byte-level GPT on the default corpus, at equal tokens per node: one node alone, data parallel with
four members in every step, DiLoCo with four members in float32 and with int8 and error feedback.
All with the same inner optimizer, rate and schedule, one seed. The members are threads of this
process that meet in memory; strategies, codecs, data and the inner step are the ones that workers
run. Bytes are those of the encoded tensors that a member sends through a relay.

Every trajectory is compared, round by round, with an independent single-process reference
(tests/reference). `reference_deviation` is the largest relative distance of the parameters in the
rounds that were compared; with `--quick` these are the rounds of the first steps only.
A rounding that differs in the last bit can flip an int8 value, hence its larger distance.
`reduction` compares DiLoCo's bytes with an fp32 ring all-reduce in every step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.clock import RealClock
from atoll.codec import Codec, make_codec
from atoll.config import TrainTable
from atoll.data import BatchStream, HeldOut, Shards, load_dataset
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup as GroupOfOne
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import DiLoCo, NoSync
from atoll.models import GPT, GPTConfig
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.task import Task
from atoll.train.batches import MemberStream
from atoll.train.evaluate import evaluate
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from atoll.train.results.summary import ddp_bytes
from bench.kit.report import emit
from tests.reference.algorithms import (
    Inner,
    Trajectory,
    Wire,
    data_parallel,
    diloco,
    flat,
    one_node,
)

MEMBERS = 4
SEED = 7
LATER_ROUNDS = 50
"""Of a run with a round in every step, only every so many-th is kept for the comparison."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    table: TrainTable
    outer: DiLoCo
    compared_steps: int
    """Steps that the references repeat."""
    held_out_tokens: int | None
    """How much is evaluated on; None: all."""
    held_out: HeldOut
    shards: Shards
    model: GPT


@dataclass
class Outcome:
    """One method's run."""

    model: GPT
    seconds: float
    sent_bytes: int = 0
    rounds: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Step -> parameters after a round."""
    identical: bool = True


def make_setting(*, quick: bool) -> Setting:
    torch.manual_seed(SEED)
    model = GPT(GPTConfig(layers=2, width=64, heads=4, context=64))
    steps = 180 if quick else 2000
    table = TrainTable(steps=steps, batch=16, lr=8e-3, warmup=50, final_lr=0.02, clip=1.0)
    common = {"outer_lr": 0.8, "outer_momentum": 0.75}
    outer = (
        DiLoCo(every=10, shared_steps=40, **common)  # type: ignore[arg-type]
        if quick
        else DiLoCo(every=35, shared_steps=170, **common)  # type: ignore[arg-type]
    )
    dataset = load_dataset("stdlib", seed=SEED)
    shards = Shards(dataset.train, slots=MEMBERS, context=model.config.context, seed=SEED)
    return Setting(
        table=table,
        outer=outer,
        compared_steps=60 if quick else steps,
        held_out_tokens=65_536 if quick else None,
        held_out=dataset.held_out,
        shards=shards,
        model=model,
    )


# ------------------------------------------------------------------------------ the real thing


def train(setting: Setting, options: Any, *, members: int, codec: str) -> Outcome:
    """Train with the strategies that workers use; return the first member's outcome."""
    began = time.perf_counter()
    groups = MemoryGroups(members) if members > 1 else None
    bodies = [copy.deepcopy(setting.model) for _ in range(members)]

    def body(group: Group) -> Outcome:
        slot = int(group.me[1:])
        return train_member(setting, options, group, slot, model=bodies[slot], codec=codec)

    outcomes = (
        groups.together(body, timeout_s=3600.0) if groups is not None else [body(GroupOfOne())]
    )
    first = outcomes[0]
    first.seconds = time.perf_counter() - began
    last = flat(first.model)
    first.identical = all(torch.equal(flat(other.model), last) for other in outcomes[1:])
    return first


def train_member(
    setting: Setting, options: Any, group: Group, slot: int, *, model: GPT, codec: str
) -> Outcome:
    """Train one member."""
    optimizer = build_optimizer(model, setting.table)
    schedule = StepSchedule(optimizer, learning_rate(setting.table))
    task = Task(model, optimizer, schedule, member=group.me)
    outer = options.build()
    outer.setup(task, group=group, codec=make_codec(codec))
    outer.begin(task)
    stream = MemberStream(
        setting.shards, slot=slot, batch=setting.table.batch, shared_steps=outer.shared_steps
    )
    inner = Local(language_model_loss, clip=setting.table.clip)
    outcome = Outcome(model, 0.0)
    while task.step < setting.table.steps:
        sync = inner.step(task, next(stream), outer).sync
        early = task.step <= 10 or task.step % LATER_ROUNDS == 0
        if slot == 0 and sync is not None and (early or not isinstance(options, EveryStep)):
            outcome.kept[task.step] = flat(model)
    outer.finish(task)
    outcome.kept[task.step] = flat(model)
    outcome.sent_bytes, outcome.rounds = group.sent_bytes, task.round
    return outcome


# ------------------------------------------------------------------------------ the references


def shared_then_own(setting: Setting, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield slot 0's batches during the shared start and the own ones after; slot 0 goes on."""
    batch = setting.table.batch
    shared = BatchStream(setting.shards, slot=0, batch=batch)
    for _ in range(setting.outer.shared_steps):
        yield next(shared)
    own = shared if slot == 0 else BatchStream(setting.shards, slot=slot, batch=batch)
    yield from own


def lossy_wire(codec: str) -> Wire:
    """Return what the wire makes of DiLoCo's vectors; the end of the shared start is exact."""
    senders = [make_codec(codec) for _ in range(MEMBERS)]
    started = [False] * MEMBERS
    back: Codec = senders[0].base

    def up(member: int, vector: Tensor) -> Tensor:
        if not started[member]:
            started[member] = True
            return vector
        sender = senders[member]
        decoded = sender.base.decode(sender.encode(vector.contiguous(), key="delta"))
        sender.finish(committed=True)
        return decoded

    def down(round_: int, vector: Tensor) -> Tensor:
        return vector if round_ == 0 else back.decode(back.encode(vector, key="mean"))

    return Wire(up=up, down=down)


def reference(setting: Setting, name: str) -> Trajectory:
    """Return the trajectory of a method by the independent implementation."""
    steps, rate = setting.compared_steps, learning_rate(setting.table)
    inner = Inner(lr=rate, clip=setting.table.clip)
    batch, shards = setting.table.batch, setting.shards
    streams = [BatchStream(shards, slot=slot, batch=batch) for slot in range(MEMBERS)]
    if name == "single":
        return one_node(setting.model, streams[0], steps=steps, inner=inner)
    if name == "ddp":
        return data_parallel(setting.model, streams, steps=steps, inner=inner)
    outer = setting.outer
    return diloco(
        setting.model,
        [shared_then_own(setting, slot) for slot in range(MEMBERS)],
        steps=steps,
        every=outer.every,
        outer_lr=outer.outer_lr,
        momentum=outer.outer_momentum,
        inner=inner,
        warmup_steps=outer.shared_steps,
        warmup_every=outer.shared_steps,
        wire=lossy_wire("feedback(int8)") if name == "diloco_int8" else None,
    )


def steps_of_rounds(setting: Setting, name: str) -> list[int]:
    """Return after which step each round of the reference's trajectory was."""
    steps, outer = setting.compared_steps, setting.outer
    if name == "single":
        return [steps]
    if name == "ddp":
        return list(range(1, steps + 1))
    later = range(outer.shared_steps + outer.every, steps, outer.every)
    return [outer.shared_steps, *later, steps]


def deviations(
    setting: Setting, name: str, found: Outcome, trajectory: Trajectory
) -> dict[int, float]:
    """Return the relative distance from the reference after each round that both know."""
    distances: dict[int, float] = {}
    for step, expected in zip(steps_of_rounds(setting, name), trajectory.rounds, strict=True):
        if step in found.kept:
            distance = (found.kept[step] - expected).norm() / expected.norm()
            distances[step] = float(distance)
    return distances


# ---------------------------------------------------------------------------------- all of it


def held_out_loss(setting: Setting, model: torch.nn.Module) -> float:
    batches = functools.partial(setting.held_out.batches, context=64)
    return evaluate(model, batches, limit_tokens=setting.held_out_tokens).loss


def compare(setting: Setting) -> dict[str, Any]:
    methods: dict[str, tuple[Any, int, str]] = {
        "single": (NoSync(every=setting.compared_steps), 1, "fp32"),
        "ddp": (EveryStep(), MEMBERS, "fp32"),
        "diloco_fp32": (setting.outer, MEMBERS, "fp32"),
        "diloco_int8": (setting.outer, MEMBERS, "feedback(int8)"),
    }
    rows: list[dict[str, Any]] = []
    for name, (options, members, codec) in methods.items():
        found = train(setting, options, members=members, codec=codec)
        loss = held_out_loss(setting, found.model)
        trajectory = reference(setting, name)
        distances = deviations(setting, name, found, trajectory)
        whole = setting.compared_steps == setting.table.steps
        rows.append(
            {
                "method": name,
                "loss": loss,
                "seconds": found.seconds,
                "rounds": found.rounds,
                "sent_bytes": found.sent_bytes,
                "identical": found.identical,
                "deviation": max(distances.values()),
                "first_deviation": next(iter(distances.values())),
                "reference_loss": held_out_loss(setting, trajectory.model) if whole else None,
            }
        )
        sys.stderr.write(f"{name}: {loss:.4f} in {found.seconds:.0f} s\n")
    parameters = sum(p.numel() for p in setting.model.parameters())
    ring = ddp_bytes(parameters=parameters, members=MEMBERS, steps=setting.table.steps)
    table = {row["method"]: row for row in rows}
    return {
        **{name: round(row["loss"], 4) for name, row in table.items()},
        "reduction": round(ring / table["diloco_int8"]["sent_bytes"], 1),
        "reduction_fp32": round(ring / table["diloco_fp32"]["sent_bytes"], 1),
        "gap_to_ddp": round(table["diloco_int8"]["loss"] / table["ddp"]["loss"] - 1, 4),
        "int8_gap": round(table["diloco_int8"]["loss"] / table["diloco_fp32"]["loss"] - 1, 4),
        "reference_deviation": max(row["deviation"] for row in rows),
        "compared_steps": setting.compared_steps,
        "replicas_identical": all(row["identical"] for row in rows),
        "steps": setting.table.steps,
        "tokens_per_node": setting.table.steps * setting.table.batch * 64,
        "rounds": table["diloco_int8"]["rounds"],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="180 steps instead of 2,000")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = RealClock().monotonic()
    result = compare(make_setting(quick=arguments.quick))
    result["seconds"] = round(RealClock().monotonic() - began, 1)
    emit(result, result["rows"])


if __name__ == "__main__":
    main()
