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
from atoll.devices.choose import AUTO, CPU, choose
from atoll.devices.runtime import BACKENDS, backend, has_backend, set_current
from atoll.errors import ConfigError

dist: Any = torch.distributed
"""Untyped, because torch's stubs omit most of what is used here."""


def device_of(place: RankPlace, *, wanted: str) -> torch.device:
    """Return the device of a rank, by the job's wish `wanted`.

    Where ranks cannot exchange tensors on this kind of device, `auto` is the processor.

    Raises:
        ConfigError: it has no such device.
    """
    local_ranks = place.local_ranks or place.ranks
    device = choose(wanted, local_rank=place.local_rank, local_ranks=local_ranks)
    if place.ranks == 1 or has_backend(device):
        return device
    if wanted == AUTO:
        return torch.device(CPU)
    raise ConfigError(
        "ranks cannot exchange tensors on this kind of device",
        given=f'device = "{wanted}" in [job], {place.ranks} ranks',
        expected="an accelerator with a backend of torch.distributed: " + ", ".join(BACKENDS),
        remedy='device = "cpu" in [job], or a member per accelerator: inner = "local"',
    )


@contextmanager
def world(place: RankPlace, *, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Run the body in the island's default process group: NCCL on CUDA, else Gloo."""
    set_current(device)
    dist.init_process_group(
        backend=backend(device),
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
