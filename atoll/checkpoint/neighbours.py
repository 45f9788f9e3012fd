"""Rebuild a lost stage from the parameters of its neighbours, when no copy of it is left.

CheckFree (https://arxiv.org/abs/2506.15461): the mean of the stage before and the stage after.

Differs from the paper:
  * a plain mean: its weights are the norms of clipped gradients, nearly always 1 in its own code;
  * layer by layer, so that stages with other layers besides (an embedding, a head) can give theirs;
  * the learning rate is not raised afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.errors import CheckpointError

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


class NeighboursDiffer(CheckpointError):
    """The neighbours of a stage have no layers like its own."""


@torch.no_grad()
def fill_from_neighbours(
    targets: Mapping[str, Tensor], neighbours: Sequence[Mapping[str, Tensor]]
) -> None:
    """Fill a stage's tensors, by name in the whole model, with the mean of its neighbours'.

    The first layer of the stage becomes the mean of the neighbours' first layers of that kind, and
    so on; a neighbour with fewer gives its last one again.

    Raises:
        NeighboursDiffer: a tensor has no counterpart of its shape; nothing was filled.
    """
    found: dict[str, Tensor] = {}
    own = _by_kind(targets)
    near = [_by_kind(tensors) for tensors in neighbours]
    for kind, layers in own.items():
        for place, name in enumerate(layers):
            parts = []
            for tensors, kinds in zip(neighbours, near, strict=True):
                like = kinds.get(kind, []) if _NUMBER.search(name) else []
                fitting = [n for n in like if tensors[n].shape == targets[name].shape]
                if not fitting:
                    raise NeighboursDiffer(
                        "a stage cannot be rebuilt from its neighbours",
                        given=f"{name} of shape {tuple(targets[name].shape)}",
                        expected="layers of the same kind and shape in both neighbouring stages",
                        remedy='lost_stage = "wait" in [swarm]: the newest checkpoint is used',
                    )
                parts.append(tensors[fitting[min(place, len(fitting) - 1)]])
            total = torch.stack([part.to(targets[name]) for part in parts])
            # Counters, e.g. of batches, have no mean.
            found[name] = total.mean(0) if total.is_floating_point() else total[0]
    for name, value in found.items():
        targets[name].copy_(value)


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return names of the same kind: those that differ in the number of their layer only."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for name in tensors:
        bare = name.removeprefix(MODEL_PREFIX)
        number = _NUMBER.search(bare)
        kind = _NUMBER.sub("#", bare, count=1)
        kinds.setdefault(kind, []).append((int(number[0]) if number else 0, name))
    return {kind: [name for _, name in sorted(names)] for kind, names in kinds.items()}
