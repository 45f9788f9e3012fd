"""What the worker's loop costs: `python -m bench.loop [--quick] [--device D]`, JSON on stdout.

The same model on the same batches, once in the worker's inner loop (outer strategy `alone`, with
metrics written and reported) and once in a bare PyTorch loop that does nothing but train. Segments
of both take turns in one process on one thread, and every other pair swaps their order, so that a
busy machine slows both alike. `ratio` is the median over pairs of the loop's tokens per second
divided by those of the bare loop; `cpu_ratio` is the same from CPU time of all segments together,
which other programs on the machine disturb less; `identical` says that both end with the same bits.

On an accelerator (`--device auto` takes it) both compute in bf16 where it has that. The bare loop
copies its batches from page-locked memory, and never waits for the device inside a segment.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.clock import RealClock
from atoll.codec import make_codec
from atoll.config import TrainTable
from atoll.data import Shards
from atoll.devices.choose import choose
from atoll.devices.facts import name_of
from atoll.devices.runtime import synchronize
from atoll.group.single import SingleGroup
from atoll.methods.periodic import NoSync as AloneOptions
from atoll.models import GPT, GPTConfig
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import dtype_of, precision_on
from atoll.task import Task
from atoll.train.batches import MemberStream
from atoll.train.loop import Loop
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from atoll.train.results.metrics import Recorder, Totals
from atoll.wire.messages import Point
from bench.kit.report import emit

SEED = 7
Segment = Callable[[int], None]
"""Trains for so many steps."""


CPU = torch.device("cpu")


def make_model(config: GPTConfig, device: torch.device) -> GPT:
    torch.manual_seed(SEED)
    return GPT(config).to(device)


def make_stream(
    model: GPT, table: TrainTable, device: torch.device = CPU
) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, 256, (1_000_000,), generator=source).to(torch.uint16)
    shards = Shards(tokens, slots=1, context=model.config.context, seed=SEED)
    return MemberStream(shards, slot=0, batch=table.batch, device=device)


def bare_segment(model: GPT, table: TrainTable, device: torch.device, precision: str) -> Segment:
    """Return the loop that everybody writes by hand."""
    optimizer = build_optimizer(model, table)
    lower = dtype_of(precision)
    stream, rate = make_stream(model, table), learning_rate(table)
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(done)
            inputs, targets = next(stream)
            if device != CPU:
                inputs = inputs.pin_memory().to(device, non_blocking=True)
                targets = targets.pin_memory().to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
                loss = model.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), table.clip)
            optimizer.step()
            done += 1
        synchronize(device)

    return train


@contextlib.contextmanager
def atoll_segment(
    model: GPT, table: TrainTable, folder: Path, device: torch.device, precision: str
) -> Iterator[Segment]:
    """Yield the worker's loop, which pauses where a worker would be asked to stop."""
    optimizer = build_optimizer(model, table)
    task = Task(model, optimizer, StepSchedule(optimizer, learning_rate(table)))
    clock, group, outer = RealClock(), SingleGroup(), AloneOptions().build()
    outer.setup(task, group=group, codec=make_codec("fp32"))
    shipped: deque[Point] = deque(maxlen=1000)
    recorder = Recorder(task, clock=clock, path=folder / "m.jsonl", report=shipped.append)
    pause_at = 0
    loop = Loop(
        task=task,
        stream=make_stream(model, table, device),
        inner=Local(
            language_model_loss, clip=table.clip, options=InnerOptions(precision=precision)
        ),
        outer=outer,
        group=group,
        steps=table.steps,
        recorder=recorder,
        totals=Totals(),
        clock=clock,
        after_round=lambda sync, last: None,
        should_stop=lambda: task.step >= pause_at,
    )

    def train(steps: int) -> None:
        nonlocal pause_at
        pause_at = task.step + steps
        loop.run()
        synchronize(device)

    yield train
    recorder.close()


def seconds_of(train: Segment, steps: int) -> tuple[float, float]:
    """Return elapsed and CPU seconds of a segment."""
    start, start_cpu = time.perf_counter(), time.thread_time()
    train(steps)
    return time.perf_counter() - start, time.thread_time() - start_cpu


def compare(
    *, pairs: int, segment_s: float, folder: Path, device: torch.device = CPU,
    config: GPTConfig | None = None, batch: int = TrainTable().batch,
) -> dict[str, Any]:  # fmt: skip
    table, precision = TrainTable(steps=10**6, batch=batch), precision_on("auto", device)
    models = [make_model(config or GPTConfig(), device) for _ in range(2)]
    bare = bare_segment(models[1], table, device, precision)
    ours_times: list[tuple[float, float]] = []
    bare_times: list[tuple[float, float]] = []
    with atoll_segment(models[0], table, folder, device, precision) as ours:
        ours(40)
        bare(20)
        steps = max(20, round(20 * segment_s / seconds_of(bare, 20)[0]))
        turns = [(ours, ours_times), (bare, bare_times)]
        for _ in range(pairs):
            for train, times in turns:
                times.append(seconds_of(train, steps))
            turns.reverse()
    (ours_s, ours_cpu_s), (bare_s, bare_cpu_s) = (
        zip(*times, strict=True) for times in (ours_times, bare_times)
    )
    ratios = [b / a for a, b in zip(ours_s, bare_s, strict=True)]
    tokens = steps * table.batch * models[0].config.context
    weights = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return {
        "device": name_of(device),
        "precision": precision,
        "ratio": round(statistics.median(ratios), 4),
        "atoll_tokens_per_s": round(tokens / statistics.median(ours_s)),
        "bare_tokens_per_s": round(tokens / statistics.median(bare_s)),
        "cpu_ratio": round(sum(bare_cpu_s) / sum(ours_cpu_s), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "steps_per_segment": steps,
        "bare_step_ms": round(statistics.median(bare_s) / steps * 1e3, 3),
        "parameters": sum(p.numel() for p in models[0].parameters()),
        "identical": all(torch.equal(a, b) for a, b in weights),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter segments")
    parser.add_argument("--device", default="cpu", help="auto: the accelerator if there is one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        result = compare(
            pairs=21 if arguments.quick else 61,
            segment_s=0.25 if arguments.quick else 0.5,
            folder=Path(name),
            device=choose(arguments.device),
        )
    emit(result, [{key: value for key, value in result.items() if key != "pairs"}])


if __name__ == "__main__":
    main()
