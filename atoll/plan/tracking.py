"""Counts the memory of a computation on fake tensors.

Fake tensors take the same dispatch path as real ones, including saved results of kernels, so
lifetimes are exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class _Result:
    """Memory of a live result."""

    weak: weakref.ref[torch.UntypedStorage]
    nbytes: int
    copied: bool
    counted: bool = True
    """Part of `alive_bytes`: gradients of parameters are not."""


class Tracking(TorchDispatchMode):
    """Observes every operation inside its context and tracks live results.

    Each operation costs the same however many results are alive: a storage reports its own end.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        """Count tensors created from here; `own` are the parameters, see `copied_bytes`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {_key(tensor): tensor for tensor in own}
        self._alive: dict[int, _Result] = {}
        self._hooks: list[Any] = []
        self.alive_bytes = 0
        """Bytes of live tensors created here, without gradients of parameters."""
        self.most_bytes = 0
        """Peak of `alive_bytes`."""

    def __enter__(self) -> Tracking:
        """Start observing."""
        for tensor in self._own.values():
            if tensor.requires_grad:
                hook: Any = tensor.register_post_accumulate_grad_hook  # torch has no types for it
                self._hooks.append(hook(self._is_gradient))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop observing."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its results."""
        found = func(*args, **(kwargs or {}))
        copied = func is _TO_COPY and _key(args[0]) in self._own
        for value in _pytree.tree_leaves(found):
            if isinstance(value, Tensor):
                self._note(value, copied=copied)
        self.most_bytes = max(self.most_bytes, self.alive_bytes)
        return found

    @property
    def copied_bytes(self) -> int:
        """Part of `alive_bytes`: copies of parameters in another dtype."""
        return sum(one.nbytes for one in self._alive.values() if one.copied)

    def _note(self, tensor: Tensor, *, copied: bool) -> None:
        key = _key(tensor)
        if key not in self._own and key not in self._alive:
            storage = tensor.untyped_storage()
            weak = weakref.ref(storage, partial(self._freed, key))
            self._alive[key] = _Result(weak, storage.nbytes(), copied)
            self.alive_bytes += storage.nbytes()

    def _freed(self, key: int, _: object) -> None:
        self._discount(self._alive.pop(key))

    def _is_gradient(self, parameter: Tensor) -> None:
        found = self._alive.get(_key(parameter.grad)) if parameter.grad is not None else None
        if found is not None:
            self._discount(found)

    def _discount(self, found: _Result) -> None:
        if found.counted:
            found.counted = False
            self.alive_bytes -= found.nbytes


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
