"""A user's script on every rank of an island, in few lines: models spread by torch's own means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from atoll.config import MeshShape, RankPlace
from atoll.group.base import Group
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.follower import FollowerRun
from atoll.run.place import Membership
from atoll.train.island.script_ranks import ScriptRanks

ROWS = 8
STEPS = 8
Spread = Callable[[nn.Module, Run], nn.Module]


def net(*, seed: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a small network; its 5 hidden rows cannot be shared out evenly between two."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 2)).to(dtype)


def by_fsdp(model: Any, run: Run) -> nn.Module:
    mesh = run.mesh["shard"]
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def by_ddp(model: nn.Module, run: Run) -> nn.Module:
    return DistributedDataParallel(model, process_group=run.mesh.get_group("replicate"))


def by_tensor(model: nn.Module, run: Run) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, run.mesh["tensor"], plan)


def by_both(model: nn.Module, run: Run) -> nn.Module:
    return by_fsdp(by_tensor(model, run), run)


WAYS: Mapping[str, tuple[MeshShape, Spread]] = {
    "fsdp": (MeshShape(shard=2), by_fsdp),
    "ddp": (MeshShape(replicate=2), by_ddp),
    "tensor": (MeshShape(tensor=2), by_tensor),
    "both": (MeshShape(shard=2, tensor=2), by_both),
}


def enter(shape: MeshShape, *, folder: Path, group: Group | None = None) -> Run:
    """Return this rank's run, as `atoll.join()` makes it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = RankPlace(rank=rank, ranks=ranks, local_rank=rank, address="127.0.0.1", port=0)
    mine = ScriptRanks(place, shape=shape, device="cpu")
    if not mine.leads:
        return FollowerRun(mine, Membership(folder), member="w0")
    return Run(group or SingleGroup(), Membership(folder), ranks=mine)


def rows(step: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step."""
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=dtype)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], dim=1)


def own_rows(run: Run, step: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the batch: contiguous ones, as many as all others."""
    ranks = run._ranks
    x, y = rows(step, dtype=dtype)
    share = slice(ranks.data_rank, None, ranks.shape.data)
    return x[share], y[share]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters whole, by name; collective."""
    return {
        name.removeprefix("module."): getattr(p.detach(), "full_tensor", p.detach)().clone()
        for name, p in model.named_parameters()
    }


def train(
    run: Run, model: nn.Module, optimizer: Any, *, steps: int = STEPS, first: int = 0
) -> list[float]:
    """Train as a user's loop does; return this rank's losses."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(first, first + steps):
        x, y = own_rows(run, step, dtype=dtype)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        run.log(loss=loss, tokens=len(x))
        optimizer.step()
        losses.append(loss.item())
        if run.stopping:
            break
    return losses
