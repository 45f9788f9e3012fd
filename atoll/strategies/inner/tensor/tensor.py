"""Tensor parallelism: each rank computes some heads and some features of a layer.

A column layer takes whole features and returns a slice of its outputs; a row layer takes a slice
and returns the whole sum. Half a block therefore costs one all-reduce in forward, after the row
layer, and one in backward, before the column layers. See `plans.WORDS` for other words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from atoll.errors import ConfigError
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.tensor.plans import TensorPlan, plan_of
from atoll.strategies.inner.tensor.sequence import (
    SEQUENCE,
    SequenceSharded,
    drops,
    joined,
    own,
    piece_of,
    whole_of,
)
from atoll.strategies.inner.tensor.vocabulary import split_criterion

HEADS_DIMENSION = 2
"""The head dimension of queries and keys (rows, length, heads, features)."""


def apply_tensor(
    module: nn.Module, model: nn.Module, mesh: DeviceMesh, options: InnerOptions
) -> None:
    """Split the layers of a module over the tensor axis, in place; collective.

    Split parameters become DTensors on `mesh`. If the output layer is split by tokens, the outputs
    are slices of the logits, and `model.criterion` is replaced by one for slices.

    Args:
        module: The whole model or a pipeline stage; equal on all ranks.
        model: The whole model, for names, plan and criterion.
        mesh: The tensor axis.
        options: What is split, and the job file's plan.

    Raises:
        ConfigError: see :func:`plan_of`; or the places of a shared matrix are split differently.
    """
    if mesh.size() == 1:
        return
    plan = plan_of(model, options)
    words = {model.get_submodule(name): word for name, word in plan.words.items()}
    shared = _shared(module)
    split = _Split(
        mesh, options, apart=SequenceSharded(mesh.get_local_rank()) if drops(model) else None
    )
    for part in module.modules():
        if part in words:
            split.apply(part, words[part])
    _tie(shared, {part: name for name, part in model.named_modules()})
    if options.vocabulary:
        _split_loss(module, model, plan, mesh)


class _Split:
    """Applies words of a plan to modules."""

    def __init__(
        self, mesh: DeviceMesh, options: InnerOptions, *, apart: SequenceSharded | None
    ) -> None:
        self._mesh, self._options, self._apart = mesh, options, apart
        self._entrance = _SplitInput(mesh, sequence=options.sequence, apart=apart)
        self._whole = _SplitInput(mesh, sequence=options.sequence, apart=None)
        between = Shard(SEQUENCE) if options.sequence else Replicate()
        self._between: Placement = between

    def apply(self, part: nn.Module, word: str) -> None:
        """Split a module as a word says."""
        if word == "column":
            part.register_forward_pre_hook(self._entrance.enter)
            self._style(part, ColwiseParallel())
        elif word == "row":
            part.register_forward_pre_hook(self._entrance.leave)
            self._style(part, RowwiseParallel(output_layouts=self._between))
        elif word == "gather":
            part.register_forward_pre_hook(self._whole.enter)
            self._style(part, ColwiseParallel(output_layouts=Replicate()))
            part.register_forward_hook(_handed_out)
        elif word == "slice":
            part.register_forward_pre_hook(lambda *_: self._whole.forget())
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=self._between)
            self._style(part, style)
        elif word == "inside":
            self._style(part, SequenceParallel(sequence_dim=HEADS_DIMENSION, use_local_output=True))
        elif word == "vocabulary":
            self._vocabulary(part)
        elif self._options.sequence and word != "replicate":
            self._along(part, word)

    def _vocabulary(self, part: nn.Module) -> None:
        if isinstance(part, nn.Embedding):
            if self._options.vocabulary:
                self._style(part, RowwiseParallel(input_layouts=Replicate()))
                part.register_forward_hook(_handed_out)
        elif self._options.vocabulary:
            entrance = _SplitInput(self._mesh, sequence=self._options.sequence, apart=None)
            part.register_forward_pre_hook(entrance.enter)
            part.register_forward_hook(lambda *_: entrance.forget())
            self._style(part, ColwiseParallel())
            part.register_forward_hook(_handed_out)
        elif self._options.sequence:
            part.register_forward_pre_hook(lambda _, given: (whole_of(given[0], self._mesh),))

    def _along(self, part: nn.Module, word: str) -> None:
        if word == "cut":
            part.register_forward_hook(lambda _, __, given: piece_of(given, self._mesh))
            return
        if self._apart is not None and isinstance(part, nn.modules.dropout._DropoutNd):
            part.register_forward_pre_hook(_Dropping(self._apart).enter)
            part.register_forward_hook(_Dropping(self._apart).leave)
        elif any(True for _ in part.parameters()):
            self._style(part, SequenceParallel(sequence_dim=SEQUENCE, use_local_output=True))
            part.register_forward_hook(_handed_out)
        if word == "join":
            part.register_forward_hook(lambda _, __, given: whole_of(given, self._mesh))

    def _style(self, part: nn.Module, style: ParallelStyle) -> None:
        # Each rank cuts its own copy. By default torch scatters that of the first rank, except for
        # meta tensors: a first rank with real tensors would wait forever for ranks with meta ones.
        parallelize_module(part, self._mesh, style, src_data_rank=None)


def _handed_out(part: nn.Module, given: tuple[Any, ...], outputs: Tensor) -> Tensor:
    """Hook after a unit: torch warns if a sharded module returns a view."""
    return own(outputs)


class _SplitInput:
    """The input of a split: its column layers share one all-reduce of the input's gradients.

    Queries, keys and values use the same features: each rank adds up their gradients before the
    all-reduce.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence: bool, apart: SequenceSharded | None) -> None:
        self._mesh, self._sequence, self._apart = mesh, sequence, apart
        self._given: Tensor | None = None
        self._distributed: DTensor | None = None

    def enter(self, part: nn.Module, given: tuple[Any, ...]) -> Any:
        """Hook before a column layer."""
        x, *others = given
        if x is not self._given:
            inside = self._given is not None  # a second input of the same split
            self._given, self._distributed = x, self._whole(x)
            if self._apart is not None and part.training and not inside:
                self._apart.enter(x.device)
        return (self._distributed, *others)

    def leave(self, part: nn.Module, given: tuple[Any, ...]) -> None:
        """Hook before a row layer."""
        self.forget()
        if self._apart is not None:
            self._apart.leave()

    def forget(self) -> None:
        """Drop the tensor."""
        self._given = self._distributed = None

    def _whole(self, x: Tensor) -> DTensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(kind))  # halves the bytes sent
        if self._sequence:
            return joined(x, self._mesh)
        return DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)


class _Dropping:
    """Hooks around dropout on a piece of the sequence, which differs between ranks."""

    def __init__(self, apart: SequenceSharded) -> None:
        self._apart = apart

    def enter(self, part: nn.Module, given: tuple[Any, ...]) -> None:
        """Hook before the module."""
        if part.training:
            self._apart.enter(given[0].device)

    def leave(self, *_: Any) -> None:
        """Hook after the module."""
        self._apart.leave()


# --------------------------------------------------------------------------------- shared matrices


def _shared(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places[parameter].append((part, name))
    return [found for found in places.values() if len(found) > 1]


def _tie(shared: list[list[tuple[nn.Module, str]]], names: Mapping[nn.Module, str]) -> None:
    """Share split parameters again in all their places; raises ConfigError if splits differ."""
    for places in shared:
        found = [getattr(part, name) for part, name in places]
        ways = [p.placements if isinstance(p, DTensor) else None for p in found]
        if any(way != ways[0] for way in ways):
            raise ConfigError(
                "the tensor plan splits a shared matrix in different ways",
                given=", ".join(
                    f"{names.get(part, type(part).__name__)}: {way or 'whole'}"
                    for (part, _), way in zip(places, ways, strict=True)
                ),
                expected="the same word for all of its places",
                remedy="vocabulary for both embedding and output layer",
            )
        for part, name in places[1:]:
            setattr(part, name, found[0])


def _split_loss(module: nn.Module, model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Replace the criterion if the output layer is in `module` and split by tokens."""
    here = set(module.modules())
    for name, word in plan.words.items():
        head = model.get_submodule(name)
        if word == "vocabulary" and isinstance(head, nn.Linear) and head in here:
            owner = cast(Any, model)
            if callable(getattr(model, "criterion", None)):
                owner.criterion = split_criterion(
                    owner.criterion, group=mesh.get_group(), tokens=head.out_features
                )
            return
