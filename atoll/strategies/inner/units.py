"""The natural pieces of a model: what is sharded, computed again, compiled or cut apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the pieces of a model in the order of its forward pass.

    A model with `units()` knows them. Of another one they are the children of an `nn.Sequential`,
    else the items of its longest `nn.ModuleList` or inner `nn.Sequential`; what is left of the
    model belongs to none. Empty where nothing is like that.
    """
    named: Any = getattr(model, "units", None)
    if callable(named):
        return list(cast(Sequence[nn.Module], named()))
    if isinstance(model, nn.Sequential):
        return list(model)
    rows = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return list(max(rows, key=len, default=nn.ModuleList()))


def pieces(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return each unit as modules of the model itself, whose hooks its forward pass runs.

    A unit may be put together for the purpose, e.g. a norm and an output layer in an
    `nn.Sequential`: then it is represented by those of its children that the model has.
    """
    own = set(model.modules())
    found = ([u] if u in own else [c for c in u.children() if c in own] for u in units)
    return [piece for piece in found if piece]
