"""Sequence parallelism on tensor ranks, and random numbers inside a split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from atoll.devices.runtime import generators
from atoll.errors import ConfigError

SEQUENCE = 1
"""The position dimension of activations (rows, length, features)."""

SPREAD = 0x9E3779B97F4A7C15
"""Separates the seeds of neighbouring ranks: 2^64 divided by the golden ratio."""


def piece_of(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's piece of a sequence that is whole on all ranks.

    Backward gathers the gradients. Raises ConfigError if the length is not divisible.
    """
    length, ranks = x.shape[SEQUENCE], mesh.size()
    if length % ranks:
        raise ConfigError(
            "the sequence cannot be shared evenly by the tensor ranks",
            given=f"{length} positions, {ranks} tensor ranks",
            expected=f"a multiple of {ranks}",
            remedy=f"sequences of {max(1, round(length / ranks)) * ranks}, or sequence = false in"
            " [island]",
        )
    spread = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return spread.redistribute(placements=[Shard(SEQUENCE)]).to_local()


def whole_of(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the sequence, for computations that are equal on all ranks."""
    return joined(x, mesh).to_local()


def joined(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Gather the sequence, for computations of which each rank does a part.

    Backward reduce-scatters the gradients.
    """
    pieces = DTensor.from_local(x, mesh, [Shard(SEQUENCE)], run_check=False)
    return pieces.redistribute(placements=[Replicate()])


def own(x: Tensor) -> Tensor:
    """Return the same memory as a tensor that is not a view, as sharded modules have to."""
    alone: Any = _SliceSequence.apply
    found: Tensor = alone(x)
    return found


class _SliceSequence(torch.autograd.Function):
    """The identity, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class SequenceSharded:
    """Random numbers that differ between ranks inside a section, and are equal outside.

    Each section is seeded from torch's own generator, which all ranks of a split share, so that a
    recomputed forward pass with restored generator state draws the same numbers.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: list[tuple[torch.Generator, Tensor]] = []

    def enter(self, device: torch.device) -> None:
        """Begin a section; one that was left by an exception is forgotten.

        Recomputation stops a forward pass like that once it has what it needs.
        """
        drawn = int(torch.randint(2**62, ()).item())
        seed = (drawn + SPREAD * (self._rank + 1)) % 2**63
        self._before = [(source, source.get_state()) for source in generators(device)]
        for source, _ in self._before:
            source.manual_seed(seed)

    def leave(self) -> None:
        """End a section: restore the shared generator."""
        for source, state in self._before:
            source.set_state(state)
        self._before = []


def drops(model: nn.Module) -> bool:
    """Return whether a model seems to use random numbers in training (dropout)."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        said: dict[str, Any] = vars(module)
        if any("drop" in name and isinstance(v, float) and v > 0 for name, v in said.items()):
            return True
    return False
