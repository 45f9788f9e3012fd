"""Dispatch modes that see every operation that builds a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.models.partial.call import CPU, META, Call, NotPartly, Scratch, key_of, zeros
from atoll.models.partial.recent import RecentValues


class Building(TorchDispatchMode):
    """Sees every operation that builds a model, numbered from 0."""

    def __init__(self, recent: RecentValues | None) -> None:
        """Keep `recent` values for code that looks at them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.recent = recent
        self._scratch = Scratch()
        self.number = 0
        self.trouble = ""
        """Why the model cannot be built in parts, also if the code hides the error."""

    def do(self, call: Call) -> Any:
        """Return the outputs of an operation, with or without values; raises NotPartly."""
        raise NotImplementedError  # abstract: the survey and the building answer differently

    def absent(self, call: Call, *, draw: bool) -> Any:
        """Return outputs on meta. Without recent values, random numbers are only used up: `draw`.

        Raises:
            NotPartly: the operation needs values that are not there.
        """
        recent = self.recent
        known = recent is not None and all(map(recent.has, call.given))
        if call.looks:
            if recent is None or not known:
                raise NotPartly(f"its code looks at values of large tensors ({call.name})")
            return call.run(recent.get)
        outputs = call.without_values()
        if recent is None:
            if draw and call.draws:
                self._scratch.run(call)
            return outputs
        if known:
            new = call.new(outputs)
            if new or call.changed():
                computed = call.run(recent.get)
                for absent, real in zip(new, _new(call, computed, outputs), strict=True):
                    recent.put(absent, real)
        elif call.draws:
            scratch: dict[int, Tensor] = {}
            call.run(lambda t: scratch.setdefault(id(t), zeros(t)))
            for tensor in call.changed():
                if tensor.nbytes == tensor.untyped_storage().nbytes():
                    recent.put(tensor, scratch[id(tensor)])
        return outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Number an operation, and do it."""
        with torch._C.DisableTorchFunction():
            call = Call.of(self.number, func, args, kwargs or {})
            self.number += 1
            try:
                return self.do(call)
            except Exception as error:
                if call.absent or isinstance(error, NotPartly):
                    self.trouble = self.trouble or f"{call.name}: {error}".splitlines()[0]
                raise


def _new(call: Call, computed: Any, outputs: Any) -> list[Tensor]:
    """Return the computed outputs at the places of those that are new."""
    known = {key_of(t) for t in call.given}
    pairs = zip(call.tensors(outputs), call.tensors(computed), strict=True)
    return [real for absent, real in pairs if key_of(absent) not in known]


class _AsIfHere(TorchFunctionMode):
    """Tensors on meta report the CPU as their device: some code skips tensors on meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return CPU if func == Tensor.device.__get__ and found == META else found


@contextmanager
def as_if_here() -> Iterator[None]:
    """Let tensors on meta report the CPU as their device."""
    with _AsIfHere():
        yield
