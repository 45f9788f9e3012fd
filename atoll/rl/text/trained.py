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
    named = model.named_parameters(remove_duplicate=False)  # tied weights have two names
    frozen = {name for name, one in named if not one.requires_grad}
    state = model.state_dict()
    return {n: one for n, one in state.items() if n not in frozen and not is_below(n, frozen)}


def load_trained(model: nn.Module, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Load the result of `trained_tensors`; all other tensors stay.

    Raises:
        CheckpointCorrupt: a name is missing or unknown, or has another shape.
    """
    learned = trained_tensors(model)
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    state = model.state_dict()
    kept = {n: one for n, one in state.items() if n not in learned and not is_below(n, frozen)}
    load_module(model, {**kept, **tensors}, what=what)


def copied(model: M) -> M:
    """Return a copy that has its frozen parameters, by far the largest part, in common with it."""
    frozen = {id(one): one for one in model.parameters() if not one.requires_grad}
    return copy.deepcopy(model, frozen)
