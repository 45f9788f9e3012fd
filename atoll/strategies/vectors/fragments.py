"""Fragments: parts of a model that are averaged at different times.

A *layer* is a tensor's name up to its first number, e.g. `blocks.3`. Fragments get whole layers, in
turns (`strided`) or as runs of neighbours (`sequential`). Tensors without a number (embedding,
head, last norm) are cut along their first dimension and spread over all fragments, so that a large
embedding does not make one fragment heavy. A model with fewer layers than fragments is cut like
that entirely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, unknown
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task, real_numel

PATTERNS = ("strided", "sequential")
"""How layers are assigned to fragments."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or rows of it."""

    index: int
    """The tensor's index in the task's order."""
    rows: tuple[int, int] | None = None
    """First and end row; None: the whole tensor."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One part of a model: pieces in the order of the tensors."""

    pieces: tuple[Piece, ...]
    num_elements: int
    num_parameters: int
    """Number of trained elements; they come first, then buffers."""

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor], *, task: Task | None = None) -> Flat:
        """Return this part of the given tensors, sharing their memory; for `task` see `Flat`."""
        parts: list[Tensor] = []
        for piece in self.pieces:
            tensor = tensors[piece.index].detach()
            parts.append(tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]])
        return Flat(parts, task=task)


def cut(
    tensors: Sequence[Tensor], names: Sequence[str], *, trained: int, count: int, pattern: str
) -> list[Fragment]:
    """Return the fragments of a model; every value is in exactly one.

    Args:
        tensors: Trained parameters, then floating-point buffers.
        names: Their names, in the same order.
        trained: How many of the tensors are parameters.
        count: Number of fragments.
        pattern: `strided` or `sequential`.

    Raises:
        ConfigError: the pattern is unknown, or there are more fragments than values.
    """
    if pattern not in PATTERNS:
        raise unknown("pattern of fragments", pattern, PATTERNS)
    layers = list(dict.fromkeys(layer for layer in map(layer_of, names) if layer))
    if len(layers) < count:
        layers = []
    dealt = _deal(layers, _sizes(layers, tensors, names), count=count, pattern=pattern)
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    for index, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
        layer = layer_of(name)
        if layer in dealt:
            pieces[dealt[layer]].append(Piece(index))
        else:
            _spread(index, tensor, pieces)
    fragments = [_fragment(mine, tensors, trained) for mine in pieces]
    if not all(fragment.num_elements for fragment in fragments):
        raise ConfigError(
            "this model is too small for so many fragments",
            given=f"fragments = {count} for {len(tensors)} tensors",
            expected=f"up to {max(1, len(layers))}",
        )
    return fragments


def names_of(model: nn.Module, tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of a model's parameters or buffers."""
    known = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return [known[id(tensor)] for tensor in tensors]


def layer_of(name: str) -> str:
    """Return a tensor's layer; empty for none."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""


def _sizes(layers: Sequence[str], tensors: Sequence[Tensor], names: Sequence[str]) -> list[int]:
    found = dict.fromkeys(layers, 0)
    for tensor, name in zip(tensors, names, strict=True):
        if layer_of(name) in found:
            found[layer_of(name)] += real_numel(tensor)
    return list(found.values())


def _deal(
    layers: Sequence[str], sizes: Sequence[int], *, count: int, pattern: str
) -> dict[str, int]:
    """Return the fragment of each layer."""
    if pattern == "strided":
        return {layer: place % count for place, layer in enumerate(layers)}
    dealt: dict[str, int] = {}
    total, before = sum(sizes), 0
    for place, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        # By the layer's middle, but never so that a later fragment is left without a layer.
        middle = int(count * (before + size / 2) / total)
        least = max(0, count - (len(layers) - place))
        last = next(reversed(dealt.values())) if dealt else -1
        dealt[layer] = min(max(middle, least, last), last + 1)
        before += size
    return dealt


def _spread(index: int, tensor: Tensor, pieces: list[list[Piece]]) -> None:
    """Cut a tensor along its first dimension and give every fragment a share."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows < 2:
        pieces[index % len(pieces)].append(Piece(index))
        return
    for place, mine in enumerate(pieces):
        first, end = (rows * edge // len(pieces) for edge in (place, place + 1))
        if first < end:
            mine.append(Piece(index, (first, end)))


def _fragment(pieces: Sequence[Piece], tensors: Sequence[Tensor], trained: int) -> Fragment:
    sizes = {piece: _elements(piece, tensors[piece.index]) for piece in pieces}
    parameters = sum(size for piece, size in sizes.items() if piece.index < trained)
    return Fragment(tuple(pieces), sum(sizes.values()), parameters)


def _elements(piece: Piece, tensor: Tensor) -> int:
    if piece.rows is None:
        return real_numel(tensor)
    return (piece.rows[1] - piece.rows[0]) * (real_numel(tensor) // tensor.shape[0])
