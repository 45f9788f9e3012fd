"""The same steps as people write them by hand: torch's own recipe of each kind of parallelism.

Nothing of Atoll is in here but the model, so that both sides multiply the same matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from atoll.models import GPT
from bench.island.kinds import CLIP, LR, Kind

Step = Callable[[Tensor, Tensor], float]
"""Does one step on the whole batch, of which it takes its rows; returns the loss of these."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def bare_step(kind: Kind, model: GPT, mesh: DeviceMesh) -> Step:
    """Return the step of one rank; `model` is taken over."""
    if kind.inner == "pipeline":
        return _pipeline(kind, model, mesh)
    trained: nn.Module = model
    if kind.mesh.get("tensor", 1) > 1:
        _cut_matrices(model, mesh["tensor"])
    if kind.mesh.get("shard", 1) > 1:
        axes: Any = ("replicate", "shard") if kind.mesh.get("replicate", 1) > 1 else "shard"
        for block in model.blocks:
            fully_shard(block, mesh=mesh[axes])
        fully_shard(model, mesh=mesh[axes])
    elif kind.mesh.get("replicate", 1) > 1:
        trained = DistributedDataParallel(model, process_group=mesh.get_group("replicate"))
    optimizer = _optimizer(list(trained.parameters()))
    ranks = mesh["replicate"].size() * mesh["shard"].size()
    mine = mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(trained(inputs.chunk(ranks)[mine]), targets.chunk(ranks)[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        _clip(list(trained.parameters()))
        optimizer.step()
        return loss.item()

    return step


def _clip(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm of all; parameters may lie on meshes of their own."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            place = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(place, []).append(parameter)
    if len(by_mesh) == 1:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        return
    norms = []
    for some in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, CLIP, total)


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, fused where it takes the parameters."""
    plain = not any(isinstance(p, DTensor) for p in parameters)
    return torch.optim.AdamW(
        parameters, LR, betas=(0.9, 0.95), weight_decay=0.1, fused=plain or None
    )


def _cut_matrices(model: GPT, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {
        "queries_keys_values": ColwiseParallel(), "merge": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def _pipeline(kind: Kind, model: GPT, mesh: DeviceMesh) -> Step:
    group, rank = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    ranks = mesh["pipeline"].size()
    count = ranks * kind.chunks
    units = model.units()
    cuts = [round(i * len(units) / count) for i in range(count + 1)]
    stages: list[Any] = []
    parameters: list[nn.Parameter] = []
    for number in range(rank, count, ranks):
        part = nn.Sequential(*units[cuts[number] : cuts[number + 1]])
        parameters += list(part.parameters())
        stages.append(PipelineStage(part, number, count, torch.device("cpu"), group=group))
    made: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, kind.microbatches, loss_fn=cross_entropy)
        if kind.chunks > 1
        else made[kind.schedule](stages[0], kind.microbatches, loss_fn=cross_entropy)
    )
    optimizer = _optimizer(parameters)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        given = (inputs,) if rank == 0 else ()
        if rank == ranks - 1:
            schedule.step(*given, target=targets, losses=losses)
        else:
            schedule.step(*given)
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in parameters:
            if parameter.grad is not None:
                squares += parameter.grad.double().square().sum()
        dist.all_reduce(squares, group=group)
        norm = math.sqrt(float(squares))
        nn.utils.clip_grads_with_norm_(parameters, CLIP, torch.tensor(norm))
        optimizer.step()
        return sum(loss.item() for loss in losses) / max(1, len(losses))

    return step
