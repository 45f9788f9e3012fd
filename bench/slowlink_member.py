"""One member of `python -m bench.slowlink`: a training loop of a script, through `run.wrap`.

Every step really trains a small GPT, and lasts as long as a large one's would: what is left of the
step after its arithmetic is slept away, as a processor waits for its accelerator. So four members
fit on one small machine, and what communication costs in processor time does not count as if it
were the accelerator's. The held-out loss of the agreed parameters is looked at in that time, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atoll
from atoll.config import TrainTable
from atoll.data import BatchStream, HeldOut, Shards, load_dataset
from atoll.models import GPT, GPTConfig
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate

SEED, MEMBERS = 7, 4
CONTEXT, BATCH, LR = 64, 8, 4e-3
EVERY, FRAGMENTS, DELAY = 40, 4, 8
LOOK_EVERY = 5
"""Steps between two looks at the held-out loss."""

Batch = tuple[Tensor, Tensor]
Data = tuple[list[Iterator[Batch]], Batch]
"""Every member's batches, and what the loss is looked at with."""

METHODS: dict[str, tuple[str, Callable[[], object]]] = {
    "alone": ("fp32", lambda: atoll.NoSync(every=10**6)),
    "ddp": ("fp32", lambda: atoll.EveryStep()),
    "diloco": (
        "feedback(int8)",
        lambda: atoll.DiLoCo(every=EVERY, outer_lr=0.8, outer_momentum=0.6),
    ),
    "streaming-diloco int4": ("feedback(int4)", lambda: streaming()),
    "streaming-diloco e3m0": ("feedback(e3m0)", lambda: streaming()),
    "cocktail-sgd": ("topk:0.2|int4", lambda: atoll.Cocktail()),
}
"""Row -> codec and options."""


def streaming() -> object:
    return atoll.Streaming(
        every=EVERY, fragments=FRAGMENTS, delay=DELAY, mix=0.5, outer_lr=0.8, outer_momentum=0.6
    )


def make_model() -> GPT:
    torch.manual_seed(SEED)
    return GPT(GPTConfig(layers=3, width=96, heads=4, context=CONTEXT))


def table(steps: int) -> TrainTable:
    return TrainTable(steps=steps, batch=BATCH, lr=LR, warmup=20, final_lr=0.1)


def make_data() -> Data:
    """Return every member's batches, and what the loss is looked at with."""
    dataset = load_dataset("stdlib", seed=SEED)
    shards = Shards(dataset.train, slots=MEMBERS, context=CONTEXT, seed=SEED)
    streams = [BatchStream(shards, slot=slot, batch=BATCH) for slot in range(MEMBERS)]
    return list(streams), first_of(dataset.held_out)


def first_of(held_out: HeldOut) -> Batch:
    return next(iter(held_out.batches(context=CONTEXT, batch=16, limit_tokens=16 * CONTEXT)))


@torch.no_grad()
def loss_of(model: GPT, batch: Batch) -> float:
    return float(model.loss(*batch))


def train(
    run: atoll.Run, *, model: GPT, data: Data, method: str, steps: int, step_s: float, out: Path
) -> None:
    """Train, and write a line per step."""
    streams, held_out = data
    stream = streams[run.slot]
    inner = build_optimizer(model, table(steps))
    schedule = StepSchedule(inner, learning_rate(table(steps)))
    codec, options = METHODS[method]
    optimizer = run.wrap(model, inner, outer=options(), steps=steps, codec=codec)
    with (out / f"{run.member}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
        start = time.monotonic()
        for step in range(1, steps + 1):
            began = time.monotonic()
            line: dict[str, Any] = {"step": step}
            inputs, targets = next(stream)
            optimizer.zero_grad()
            model.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
            run.log(tokens=targets.numel())
            if run.slot == 0 and step % LOOK_EVERY == 0:
                with run.evaluating():
                    line["loss"] = loss_of(model, held_out)
            worked_s = time.monotonic() - began
            time.sleep(max(0.0, step_s - worked_s))
            optimizer.step()
            schedule.step()
            line |= {"seconds": time.monotonic() - start, "worked_s": worked_s}
            file.write(json.dumps(line | {"sent_bytes": run.group.sent_bytes}) + "\n")
            if run.stopping:
                break
    run.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with atoll.join() as run:
        train(
            run, model=make_model(), data=make_data(), method=given.method, steps=given.steps,
            step_s=given.step_s, out=given.out,
        )  # fmt: skip


if __name__ == "__main__":
    main()
