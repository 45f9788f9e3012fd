"""A method's traffic, computed by the strategy itself on a model on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.codec.registry import make_codec
from atoll.group.single import SingleGroup
from atoll.strategies.base import Traffic
from atoll.strategies.resolve import Resolved
from atoll.task import Task

WIDTH_PER_LAYER = 64
"""Assumed width of a transformer per layer: one of 12 layers is about 768 wide."""


class Shapes(nn.Module):
    """Parameters in the shapes of a transformer with exactly the given number of values."""

    def __init__(self, elements: int) -> None:
        """Use most values for blocks and the rest for the embedding."""
        super().__init__()
        width = max(1, int((WIDTH_PER_LAYER * elements / 14) ** (1 / 3)))
        width = width // 16 * 16 or width
        layers = max(1, width // WIDTH_PER_LAYER)
        while layers and 12 * layers * width**2 > elements:
            layers -= 1
        sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        rows, rest = divmod(elements - 12 * layers * width**2, width)
        self.beside = _tensors([(rows, width), (rest,)])
        self.blocks = nn.ModuleList(_tensors(sizes) for _ in range(layers))


def _tensors(sizes: Sequence[tuple[int, ...]]) -> nn.ParameterList:
    """Return parameters of these shapes; empty ones are left out."""
    return nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes if 0 not in size)


def measure_traffic(resolved: Resolved, *, elements: int, peers: int, steps: int) -> Traffic:
    """Return what the first member sends and receives in a run of `steps`.

    The model has the shapes of a transformer of that size, for methods that look at matrices. Its
    tensors are on torch's device `meta` and take no memory.

    Raises:
        ConfigError: an option or the codec is unknown or out of range.
    """
    outer, codec = resolved.build(), make_codec(resolved.codec)
    with torch.device("meta"):
        model = Shapes(elements)
        task = Task(model, torch.optim.AdamW(model.parameters()), member="w0", last=steps)
        outer.setup(task, group=SingleGroup(), codec=codec)
    return outer.traffic(elements, peers, steps=steps)


def bits_per_value(spec: str, *, elements: int) -> float:
    """Return a codec's mean bits per value for a model of so many values."""
    codec = make_codec(spec)
    with torch.device("meta"):
        codec.set_shapes([parameter.shape for parameter in Shapes(elements).parameters()])
    return 8 * codec.nbytes(elements) / elements
