"""The tensors that outer strategies and codecs hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(roots: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors that objects of strategies and codecs hold, through what these hold."""
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, dict):
            todo += found.values()
        elif isinstance(found, list | tuple | set):
            todo += found
        elif type(found).__module__.startswith(("atoll.strategies", "atoll.codec")):
            slots = (s for kind in type(found).__mro__ for s in getattr(kind, "__slots__", ()))
            todo += [getattr(found, slot) for slot in slots if hasattr(found, slot)]
            todo += getattr(found, "__dict__", {}).values()
