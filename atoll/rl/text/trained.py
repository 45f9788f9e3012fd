"""What learning changes in a model: everything, or only adapters on a frozen base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from atoll.checkpoint.state.frozen import is_below
from atoll.rl.state_saver import load_module

M = TypeVar("M", bound=nn.Module)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that learning changes."""
    frozen = _frozen(model)
    state = model.state_dict()
    return {n: one for n, one in state.items() if n not in frozen and not is_below(n, frozen)}


def load_trained(model: nn.Module, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Load the result of `trained_tensors`; all other tensors stay.

    Raises:
        CheckpointCorrupt: a name is missing or unknown, or has another shape.
    """
    frozen = _frozen(model)
    kept = {name: one for name, one in model.state_dict().items() if name in frozen}
    load_module(model, {**kept, **tensors}, what=what)


def _frozen(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)  # tied weights have two names
    return {name for name, one in named if not one.requires_grad}


def copied(model: M) -> M:
    """Return a copy that has its frozen parameters, by far the largest part, in common with it."""
    frozen = {id(one): one for one in model.parameters() if not one.requires_grad}
    return copy.deepcopy(model, frozen)
