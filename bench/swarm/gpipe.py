"""A fixed GPipe over the members of `bench.swarm`: torch's own schedule, real processes, Gloo.

Each pipeline is a pair of members of one speed, the best pairs that there are, and gets an equal
part of the batch; members of a stage average their gradients after it. So all wait for the slowest
pair. Nothing of Atoll is in here but the model. Once it was measured, one process is killed: then
no process does another step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from bench.swarm.stand_in import SLOWNESS, tower

BEGIN_S = 180.0
"""Time for all processes to start, and do a first step."""
VOCABULARY, CONTEXT = 64, 16


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the processes receive."""

    port: int
    stages: int
    members: int
    microbatches: int
    """Of a step, of all pipelines together; one row each."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first process counted."""

    per_s: float
    """Microbatches per second, over whole steps without a failure."""
    after_failure: int
    """Steps that were done from begin to end after a process was killed."""


def measure(fixed: Fixed, *, window_s: float, silent_s: float) -> Measured:
    """Run it for a time, kill one process, and wait for so long for another step.

    Raises:
        TimeoutError: it did not begin.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(fixed.members):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(theirs, rank, fixed), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        ends = _ends(pipes[0], first_s=BEGIN_S, until_s=window_s)
        if len(ends) < 2:
            raise TimeoutError(f"GPipe did {len(ends)} steps in {BEGIN_S:.0f} + {window_s:.0f} s")
        processes[-1].kill()
        later = _ends(pipes[0], first_s=silent_s, until_s=silent_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    per_s = (len(ends) - 1) * fixed.microbatches / (ends[-1] - ends[0])
    # The first may have begun, or been over, before.
    return Measured(per_s=per_s, after_failure=max(0, len(later) - 1))


def _ends(pipe: Connection, *, first_s: float, until_s: float) -> list[float]:
    """Return when steps ended: two or more of them within `until_s` of the first."""
    found: list[float] = []
    deadline = time.monotonic() + first_s
    while (left_s := deadline - time.monotonic()) > 0 and wait([pipe], left_s):
        try:
            pipe.recv()
        except EOFError:
            break
        found.append(time.monotonic())
        if len(found) == 1:
            deadline = found[0] + until_s
    return found


def _rank(pipe: Connection, rank: int, fixed: Fixed) -> None:
    """Be one member: the first stage's come first, w0, w1, w2."""
    torch.set_num_threads(1)
    replicas = fixed.members // fixed.stages
    number, replica = divmod(rank, replicas)
    os.environ["ATOLL_MEMBER"] = f"w{replica % len(SLOWNESS)}"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{fixed.port}", rank=rank, world_size=fixed.members,
        timeout=timedelta(seconds=BEGIN_S),
    )  # fmt: skip
    stages = range(fixed.stages)
    pairs = [dist.new_group([s * replicas + r for s in stages]) for r in range(replicas)]
    alike = [dist.new_group([s * replicas + r for r in range(replicas)]) for s in stages]
    model = tower(vocab_size=VOCABULARY, blocks=fixed.stages, context=CONTEXT)
    part = model[number]
    stage = PipelineStage(
        part, number, fixed.stages, torch.device("cpu"), group=pairs[replica]
    )  # fmt: skip
    count = fixed.microbatches // replicas
    schedule = ScheduleGPipe(stage, count, loss_fn=_loss)
    optimizer = torch.optim.AdamW(part.parameters(), 1e-3)
    ids = torch.randint(VOCABULARY, (count, CONTEXT), generator=torch.Generator().manual_seed(7))
    given: tuple[Any, ...] = (ids,) if number == 0 else ()
    wanted: dict[str, Any] = {"target": ids, "losses": []} if number == fixed.stages - 1 else {}
    with contextlib.suppress(RuntimeError):  # of Gloo, when another process is gone
        while True:
            optimizer.zero_grad()
            schedule.step(*given, **wanted)
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad /= replicas
                    dist.all_reduce(parameter.grad, group=alike[number])
            optimizer.step()
            if rank == 0:
                pipe.send(None)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
