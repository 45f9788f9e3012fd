"""What ran on the processor while something was to run on an accelerator."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

COMPUTING = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_layer_norm",
    "native_group_norm", "_softmax", "_log_softmax", "nll_loss_forward", "gelu", "silu", "tanh",
    "_scaled_dot_product", "addcdiv", "addcmul", "lerp", "embedding_dense_backward",
)  # fmt: skip
"""Operators of models and optimizers; those of batches and of the common state are others."""


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        values = [t for t in tree_iter((args, kwargs, result)) if isinstance(t, Tensor)]
        if values and all(t.device.type == "cpu" for t in values) and max(map(_size, values)) > 1:
            self._found[func.overloadpacket.__name__] += 1
        return result


def _size(tensor: Tensor) -> int:
    return tensor.numel()


@contextmanager
def on_processor() -> Iterator[Counter[str]]:
    """Count the operators on tensors in main memory: of this thread and of those it starts."""
    found: Counter[str] = Counter()
    plain = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with _Noting(found):
            plain(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    try:
        with _Noting(found):
            yield found
    finally:
        threading.Thread.run = plain  # type: ignore[method-assign]


def computing(found: Counter[str]) -> dict[str, int]:
    """Return the operators of models and optimizers among those found."""
    return {name: times for name, times in found.items() if name.startswith(COMPUTING)}


def left_behind(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[str]:
    """Return the tensors in main memory: of a model, its gradients and its optimizers' state.

    Numbers (torch's counts of steps) may be there.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors += [(f"gradient of {n}", p.grad) for n, p in model.named_parameters() if _has_grad(p)]  # type: ignore[misc]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [(key, t) for key, t in state.items() if isinstance(t, Tensor) and t.dim()]
    return [name for name, tensor in tensors if tensor.device.type == "cpu"]


def _has_grad(tensor: Tensor) -> bool:
    return tensor.grad is not None
