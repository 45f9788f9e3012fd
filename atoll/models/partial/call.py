"""One operation of torch, with or without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

META, CPU = torch.device("meta"), torch.device("cpu")


class NotPartly(Exception):
    """A model cannot be built in parts; the text says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and its arguments; some tensors may have no values (are on meta)."""

    number: int
    func: Any
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    given: Sequence[Tensor]

    @classmethod
    def of(cls, number: int, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Call:
        """Return the call of an operation."""
        return cls(number, func, args, named, cls.tensors((args, dict(named))))

    @staticmethod
    def tensors(values: Any) -> list[Tensor]:
        """Return the tensors in nested values."""
        return [t for t in tree_leaves(values) if isinstance(t, Tensor)]

    @property
    def name(self) -> str:
        """The operation's name."""
        return str(self.func)

    @property
    def absent(self) -> bool:
        """Whether a given tensor has no values."""
        return any(t.is_meta for t in self.given)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def creates(self) -> bool:
        """Whether it makes a tensor without being given one."""
        return not self.given and any(a.name == "device" for a in self.func._schema.arguments)

    @property
    def looks(self) -> bool:
        """Whether it returns no tensor but a Python value, which code may look at."""
        return not any("Tensor" in str(r.type) for r in self.func._schema.returns)

    def new(self, outputs: Any) -> list[Tensor]:
        """Return the outputs that are not memory of what was given."""
        known = {key_of(t) for t in self.given}
        return [t for t in self.tensors(outputs) if key_of(t) not in known]

    def changed(self) -> list[Tensor]:
        """Return the given tensors that it writes to."""
        found = []
        named = {a.name: v for a, v in zip(self.func._schema.arguments, self.args, strict=False)}
        named.update(self.named)
        for argument in self.func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += self.tensors(named.get(argument.name))
        return found

    def run(self, values: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Return what it computes; `values` replaces given tensors."""
        args, named = self.args, dict(self.named)
        if values is not None:
            args, named = tree_map_only(Tensor, values, (args, named))
        if named.get("device") == META:
            named["device"] = CPU
        return self.func(*args, **named)

    def without_values(self) -> Any:
        """Return outputs on meta; raises NotPartly if a tensor with values would change."""
        if not all(t.is_meta for t in self.changed()):
            raise NotPartly("a small tensor is filled from a large one")
        args, named = tree_map_only(Tensor, on_meta, (self.args, dict(self.named)))
        if self.creates or named.get("device") is not None:
            named["device"] = META
        named.pop("pin_memory", None)
        return self.func(*args, **named)


def key_of(tensor: Tensor) -> int:
    """Return a key of a tensor's storage, unique while the storage exists."""
    return int(tensor.untyped_storage()._cdata)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form without values."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def zeros(tensor: Tensor) -> Tensor:
    """Return zeros of the same form for a tensor without values; others as they are."""
    if not tensor.is_meta:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    return made.zero_()


class Scratch:
    """Zeros for tensors without values, in the same memory every time.

    Freed memory of this size would not always go back to the system.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._memory = torch.empty(0, dtype=torch.uint8, device=CPU)

    def run(self, call: Call) -> None:
        """Do an operation whose results are not wanted."""
        shared = next((t for t in call.given if t.is_meta), None)
        call.run(lambda tensor: self._zeros(tensor) if tensor is shared else zeros(tensor))

    def _zeros(self, tensor: Tensor) -> Tensor:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
        if tensor.numel() and elements * tensor.element_size() > self._memory.nbytes:
            self._memory = self._memory[:0].clone()  # freed before
            self._memory = torch.empty(
                elements * tensor.element_size(), dtype=torch.uint8, device=CPU
            )
        made = torch.empty(0, dtype=tensor.dtype, device=CPU)
        made.set_(self._memory.untyped_storage(), 0, tensor.shape, tensor.stride())
        return made.zero_()
