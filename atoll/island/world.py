"""The process group of an island, and the mesh over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.config.mesh import AXES, MeshShape
from atoll.config.rank_environment import RankPlace
from atoll.errors import ConfigError

dist: Any = torch.distributed
"""Untyped, because torch's stubs omit most of what is used here."""


def device_of(place: RankPlace, *, wanted: str) -> torch.device:
    """Return the device of a rank; raises ConfigError if it has no accelerator.

    `wanted` is `cpu`, `cuda`, or `auto`: accelerators if this machine has one for every rank.
    """
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "auto" and count < (place.local_ranks or place.ranks):
        count = 0  # all ranks of an island must use the same kind of device
    if wanted == "cuda" and place.local_rank >= count:
        raise ConfigError(
            "there is no accelerator for this rank",
            given=f"local rank {place.local_rank}, {count} accelerators",
            remedy='device = "cpu" in [island], or fewer ranks per machine',
        )
    if place.local_rank < count:
        return torch.device("cuda", place.local_rank)
    return torch.device("cpu")


@contextmanager
def world(place: RankPlace, *, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Run the body in the island's default process group: NCCL on accelerators, else Gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{place.dial}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_mesh(shape: MeshShape, *, device: torch.device) -> DeviceMesh:
    """Return the mesh with all four axes, slowest first (collective); raises ConfigError."""
    ranks = dist.get_world_size()
    if shape.ranks != ranks:
        raise ConfigError(
            "the mesh does not divide the ranks", given=f"mesh {shape}", expected=f"{ranks} ranks"
        )
    return init_device_mesh(device.type, shape.sizes, mesh_dim_names=AXES)
