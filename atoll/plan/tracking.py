"""Counts the memory of a computation on fake tensors.

Fake tensors take the same dispatch path as real ones, including saved results of kernels, so
lifetimes are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

Weak: Any = StorageWeakRef
_TO_COPY = torch.ops.aten._to_copy.default


class Tracking(TorchDispatchMode):
    """Observes every operation inside its context and tracks live results."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        """Count tensors created from here; `own` are the parameters, see `copied_bytes`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {_key(tensor): tensor for tensor in own}
        self._alive: dict[int, tuple[Any, int, bool]] = {}
        self.most_bytes = 0
        """Peak of `alive_bytes`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its results."""
        found = func(*args, **(kwargs or {}))
        copied = func is _TO_COPY and _key(args[0]) in self._own
        for value in _pytree.tree_leaves(found):
            if isinstance(value, Tensor):
                self._note(value, copied=copied)
        self._sweep()
        self.most_bytes = max(self.most_bytes, self.alive_bytes)
        return found

    @property
    def alive_bytes(self) -> int:
        """Bytes of live tensors created here, without gradients of parameters."""
        self._sweep()
        gradients = {_key(p.grad) for p in self._own.values() if p.grad is not None}
        return sum(size for key, (_, size, _) in self._alive.items() if key not in gradients)

    @property
    def copied_bytes(self) -> int:
        """Part of `alive_bytes`: copies of parameters in another dtype."""
        self._sweep()
        return sum(size for _, size, copied in self._alive.values() if copied)

    def _note(self, tensor: Tensor, *, copied: bool) -> None:
        key = _key(tensor)
        if key not in self._own and key not in self._alive:
            storage = tensor.untyped_storage()
            self._alive[key] = (Weak(storage), storage.nbytes(), copied)

    def _sweep(self) -> None:
        for key in [key for key, (weak, _, _) in self._alive.items() if weak.expired()]:
            del self._alive[key]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
