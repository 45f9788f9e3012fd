"""The natural pieces of a model, by which it is sharded, recomputed, compiled or cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the pieces of a model in the order of its forward pass.

    They are the result of `units()`, or the children of an `nn.Sequential`, or the items of the
    longest `nn.ModuleList` or inner `nn.Sequential`; the rest of the model is in no unit. May be
    empty.
    """
    named: Any = getattr(model, "units", None)
    if callable(named):
        return list(cast(Sequence[nn.Module], named()))
    if isinstance(model, nn.Sequential):
        return list(model)
    rows = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return list(max(rows, key=len, default=nn.ModuleList()))


def pieces(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return each unit as modules of the model itself, on which hooks run.

    A unit may be created for the purpose, e.g. a norm and an output layer in an `nn.Sequential`; it
    is then represented by its children that belong to the model.
    """
    own = set(model.modules())
    found = ([u] if u in own else [c for c in u.children() if c in own] for u in units)
    return [piece for piece in found if piece]
