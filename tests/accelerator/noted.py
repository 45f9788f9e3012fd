"""What ran on the processor while something was to run on an accelerator, and what on that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.accelerator.child import is_real
from tests.accelerator.pretended import Record

COMPUTING = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_layer_norm",
    "native_group_norm", "_softmax", "_log_softmax", "nll_loss_forward", "gelu", "silu", "tanh",
    "_scaled_dot_product", "addcdiv", "addcmul", "lerp", "embedding_dense_backward",
)  # fmt: skip
"""Operators of models and optimizers; those of batches and of the common state are others."""


STEPPING_APART = {"ddp", "one-bit-adam", "powersgd", "swarm"}
"""Methods that agree on gradients: each member's optimizer computes the step on its own device."""


def assert_one_model(preset: str, here: Tensor, there: Tensor) -> None:
    """Check that members on the processor and on an accelerator have one model.

    Equal to the last bit, but where each has computed the step itself: real devices round apart.
    """
    if preset in STEPPING_APART and is_real():
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(here, there)


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


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a real accelerator's operators, as the pretended one does by itself."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        there = [t.device.index or 0 for t in given + made if t.device.type != "cpu"]
        if not there:
            return result
        if name in ("_local_scalar_dense", "equal"):
            self._record.to_host["item"] += 1
        elif made and all(t.device.type == "cpu" for t in made):
            self._record.to_host["copy"] += 1
            self._record.readers[threading.current_thread().name] += 1
        else:
            self._record.operators[name, there[0]] += 1
        return result


def _size(tensor: Tensor) -> int:
    return tensor.numel()


@contextmanager
def _everywhere(mode: Callable[[], TorchDispatchMode]) -> Iterator[None]:
    """Watch the operators of this thread, and of those that are started inside."""
    plain = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with mode():
            plain(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    try:
        with mode():
            yield
    finally:
        threading.Thread.run = plain  # type: ignore[method-assign]


@contextmanager
def on_processor() -> Iterator[Counter[str]]:
    """Count the operators on tensors in main memory."""
    found: Counter[str] = Counter()
    with _everywhere(lambda: _Noting(found)):
        yield found


@contextmanager
def recorded(record: Record) -> Iterator[None]:
    """Record the operators on an accelerator's tensors."""
    with _everywhere(lambda: _Recording(record)):
        yield


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
