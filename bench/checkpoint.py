"""What a checkpoint costs training: `python -m bench.checkpoint [--quick]`, JSON on the last line.

A member of a DiLoCo run (model, AdamW, outer velocity) saves again and again in the background.
`checkpoint_block_ratio` is the time that its training thread is held up by a save (collecting the
state, laying out the files, copying) over the time of one plain memory copy of the same tensors
into memory that is there already: median of pairs, one right after the other, the order changing
from pair to pair. `cpu_ratio` is the same of the time that the thread computes, which other
programs on the machine disturb less. `first_block_ratio` is the first save, which still has to get
its memory.

`write_mb_per_s` is what the writer process makes durable, hashing included; `disk_limit_mb_per_s`
writes and flushes the same bytes to the same folder and does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import atoll
from atoll.checkpoint import (
    BackgroundSaver,
    Extras,
    FolderTarget,
    OuterState,
    Saved,
    SavePoint,
    collect,
)
from atoll.codec import make_codec
from atoll.group.single import SingleGroup
from atoll.strategies.base import Outer
from atoll.task import Task
from bench.kit.report import emit

WIDTH = 1024
BLOCK_BYTES = 2**20
WAIT_S = 120.0


@dataclass
class Training:
    """A member right after a committed round."""

    task: Task
    outer: Outer

    def save(self, saver: BackgroundSaver) -> Saved:
        """Save as the trainer does."""
        task = self.task
        task.round += 1
        outer = OuterState(self.outer.state_dict(), base=f"{task.round:032x}")
        extras = Extras("diloco", cursor={"offset": task.step}, counters={"wall_s": 1.0})
        point = SavePoint(task.round, task.round, "w0", ["w0"])
        saved = saver.save(point, collect(task, outer, extras))
        if not isinstance(saved, Saved):
            raise RuntimeError(saved.reason)
        return saved

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a save copies."""
        state = self.task.optimizer.state_dict()["state"]
        return [
            *self.task.model.state_dict().values(),
            *(t for slot in state.values() for t in slot.values() if isinstance(t, Tensor)),
            *self.outer.state_dict().values(),
        ]


def start(*, layers: int) -> Training:
    """Return a member that has done two rounds, so that all state is there."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as a worker does
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    task = Task(model, torch.optim.AdamW(model.parameters()), member="w0")
    outer = atoll.DiLoCo(every=1, shared_steps=0, warmup_steps=0).build()
    group = SingleGroup()
    outer.setup(task, group=group, codec=make_codec("fp32"))
    outer.begin(task)
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.advance()
        task.tokens += 2
        outer.sync(task)
    return Training(task, outer)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def busy(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that some work takes, and those that this thread computes."""
    began, computed = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - began, time.thread_time() - computed


def write_plainly(path: Path, data: memoryview) -> None:
    """Write and flush bytes, nothing else."""
    with path.open("wb") as file:
        for place in range(0, len(data), BLOCK_BYTES):
            file.write(data[place : place + BLOCK_BYTES])
        file.flush()
        os.fsync(file.fileno())


def measure(training: Training, folder: Path, *, pairs: int) -> dict[str, float]:
    """Return the figures; see the module."""
    tensors = training.tensors()
    copies = [torch.empty_like(tensor) for tensor in tensors]
    events: list[str] = []
    target = FolderTarget(folder=str(folder / "job"), keep=1)
    saver = BackgroundSaver(target, scratch=folder, on_event=lambda e: events.append(e.text))

    def copy() -> None:
        with torch.no_grad():
            torch._foreach_copy_(copies, tensors)

    def save() -> None:
        training.save(saver)

    copy()
    first_s = timed(save)
    nbytes = training_bytes(tensors)
    plain = memoryview(bytearray(nbytes))
    blocked, copied, writing, limit = [], [], [], []
    for pair in range(pairs):
        if not saver.wait(WAIT_S):
            raise RuntimeError(f"a checkpoint was not written: {events}")
        if pair % 2:
            copied.append(busy(copy))
        blocked.append(busy(save))
        began = time.perf_counter()
        saver.wait(WAIT_S)
        writing.append(time.perf_counter() - began)
        if not pair % 2:
            copied.append(busy(copy))
        limit.append(timed(lambda: write_plainly(folder / "plain", plain)))
    if not saver.close(WAIT_S):
        raise RuntimeError(f"the last checkpoint was not written: {events}")
    ratios = [b / c for (b, _), (c, _) in zip(blocked, copied, strict=True)]
    computed = [b / c for (_, b), (_, c) in zip(blocked, copied, strict=True)]
    blocked_s = statistics.median(seconds for seconds, _ in blocked)
    copied_s = statistics.median(seconds for seconds, _ in copied)
    return {
        "checkpoint_block_ratio": round(statistics.median(ratios), 3),
        "state_mb": round(nbytes / 1e6, 1),
        "write_mb_per_s": round(nbytes / 1e6 / statistics.median(writing), 1),
        "disk_limit_mb_per_s": round(nbytes / 1e6 / statistics.median(limit), 1),
        "blocked_ms": round(1e3 * blocked_s, 2),
        "copy_ms": round(1e3 * copied_s, 2),
        "cpu_ratio": round(statistics.median(computed), 3),
        "worst_ratio": round(max(ratios), 3),
        "first_block_ratio": round(first_s / copied_s, 3),
        "pairs": pairs,
    }


def training_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer pairs")
    parser.add_argument("--layers", type=int, default=0, help="of a million parameters each")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    layers = arguments.layers or (5 if arguments.quick else 20)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-") as folder:
        training = start(layers=layers)
        result = measure(training, Path(folder), pairs=9 if arguments.quick else 25)
    emit(result, [{"figure": name, "value": value} for name, value in result.items()])


if __name__ == "__main__":
    main()
