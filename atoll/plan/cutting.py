"""The part of a model that one rank of an island holds, on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import MeshShape
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.tensor.plans import plan_of, splits
from atoll.strategies.inner.tensor.sequence import SEQUENCE
from atoll.strategies.inner.units import pieces


def faked(model: nn.Module) -> None:
    """Replace the meta tensors of a model by fake CPU tensors, in place; tied weights stay tied."""
    made: dict[Tensor, Tensor] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    new = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[parameter] = nn.Parameter(new, requires_grad=parameter.requires_grad)
                setattr(part, name, made[parameter])
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = made.setdefault(
                    buffer, torch.empty(buffer.shape, dtype=buffer.dtype)
                )


def cut_tensors(model: nn.Module, options: InnerOptions) -> None:
    """Give every layer the shapes of one tensor-parallel rank, in place; forward still runs.

    Raises ConfigError if the model cannot be split like this; even splits make all ranks alike.
    """
    ranks = options.shape.tensor
    if ranks == 1:
        return
    words = {model.get_submodule(n): w for n, w in plan_of(model, options).words.items()}
    named = dict(model.named_parameters())
    dims = {named[name]: dim for name, dim in splits(model, options).items()}
    slices = {whole: _slice(whole, dim, ranks) for whole, dim in dims.items()}
    for part in model.modules():
        for name, whole in list(part.named_parameters(recurse=False)):
            if whole in slices:  # a tied weight stays tied
                setattr(part, name, slices[whole])
    _cut_features(words, ranks)
    if options.sequence:
        _cut_sequence(words, ranks)


def _slice(whole: nn.Parameter, dim: int, ranks: int) -> nn.Parameter:
    own = whole.detach().narrow(dim, 0, whole.shape[dim] // ranks).clone()
    return nn.Parameter(own, requires_grad=whole.requires_grad)


def _cut_features(words: Mapping[nn.Module, str], ranks: int) -> None:
    """Imitate the all-gather and slice of features by hooks."""
    for part, word in words.items():
        if word == "gather":
            part.register_forward_hook(lambda _, __, output: torch.cat([output] * ranks, -1))
        elif word == "slice":
            part.register_forward_pre_hook(
                lambda _, args: (args[0].narrow(-1, 0, args[0].shape[-1] // ranks), *args[1:])
            )


def _cut_sequence(words: Mapping[nn.Module, str], ranks: int) -> None:
    """Imitate sequence parallelism by hooks."""
    whole = _Whole(ranks)
    for part, word in words.items():
        if word == "column" or (word == "vocabulary" and isinstance(part, nn.Linear)):
            part.register_forward_pre_hook(lambda _, args: (whole.of(args[0]), *args[1:]))
        elif word in ("row", "cut"):
            part.register_forward_hook(
                lambda _, __, output: output.narrow(SEQUENCE, 0, output.shape[SEQUENCE] // ranks)
                .clone()
            )  # fmt: skip
        elif word == "join":
            part.register_forward_hook(lambda _, __, output: whole.of(output))


class _Whole:
    """All-gathered sequences; layers with the same input share one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._piece: Tensor | None = None
        self._made: Tensor | None = None

    def of(self, piece: Tensor) -> Tensor:
        if piece is not self._piece or self._made is None:
            self._piece, self._made = piece, torch.cat([piece] * self._ranks, SEQUENCE)
        return self._made


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a parameter sharded along its first dimension."""

    shape: tuple[int, ...]
    padded: int
    """Elements allocated: all ranks' shares are padded to the largest."""


def shard_of(shape: Sequence[int], *, ranks: int, rank: int) -> Shard:
    """Return a rank's share of a tensor of this shape."""
    rows, rest = (shape[0], tuple(shape[1:])) if shape else (1, ())
    share = -(-rows // ranks)
    own = max(0, min(share, rows - rank * share))
    elements = torch.Size(rest).numel()
    return Shard((own, *rest), share * elements)


def is_sharded(shape: MeshShape) -> bool:
    """Return whether a mesh shards parameters, or stores them as if it did; see `apply_data`."""
    return shape.shard > 1 or (shape.replicate > 1 and shape.tensor > 1)


def gathered_together(module: nn.Module, units: Sequence[nn.Module]) -> tuple[list[int], int]:
    """Return the bytes of each parameter group gathered at once, and of the rest.

    The rest (parameters of several units or of none) is gathered for the whole pass; see `shard`.
    """
    held = [{p for part in unit for p in part.parameters()} for unit in pieces(module, units)]
    count = Counter(parameter for group in held for parameter in group)
    own = [group for group in held if group and all(count[p] == 1 for p in group)]
    alone = {p for group in own for p in group}
    rest = sum(_nbytes(p) for p in module.parameters() if p not in alone)
    return [sum(_nbytes(p) for p in group) for group in own], rest


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
