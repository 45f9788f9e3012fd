"""Makes the pretended accelerator a device of this process, as CUDA would be.

That cannot be undone: it belongs in processes of its own, see `child.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.accelerator.pretended import (
    DEVICES,
    GENERATORS,
    MEMORY_BYTES,
    NAME,
    RECORD,
    allocated_bytes,
    run,
)


class _Module:
    """`torch.pretended`, what `torch.cuda` is for CUDA."""

    default_generators = GENERATORS

    def __init__(self) -> None:
        self._current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = _number(device)

    def synchronize(self, device: Any = None) -> None:
        _number(device)

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return f"Pretended accelerator {_number(device)}"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY_BYTES - self.memory_allocated(device), MEMORY_BYTES

    def memory_allocated(self, device: Any = None) -> int:
        _number(device)
        return allocated_bytes()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        GENERATORS[self._current].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in GENERATORS:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return GENERATORS[_number(device)].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        GENERATORS[_number(device)].set_state(state)

    def device(self, device: Any) -> _Selected:
        return _Selected(self, _number(device))

    def current_stream(self, device: Any = None) -> PretendedStream:
        return getattr(_OWN, "stream", MAIN_STREAM)

    def Stream(self, device: Any = None) -> PretendedStream:
        return PretendedStream("own stream")

    def Event(self) -> PretendedEvent:
        return PretendedEvent()

    @contextmanager
    def stream(self, stream: PretendedStream) -> Iterator[None]:
        before, _OWN.stream = self.current_stream(), stream
        try:
            yield
        finally:
            _OWN.stream = before


@dataclass
class PretendedStream:
    """Work on it is done at once; what is recorded is the order in which threads use it."""

    name: str

    def record_event(self) -> PretendedEvent:
        event = PretendedEvent()
        event.record()
        return event

    def wait_event(self, event: PretendedEvent) -> None:
        _note(f"{self.name} waits for {event.at}")


@dataclass
class PretendedEvent:
    at: str = ""
    """The stream in which it was recorded; empty: it was not, so no wait is for it."""

    def record(self) -> None:
        self.at = MODULE.current_stream().name

    def synchronize(self) -> None:
        if self.at:
            _note(f"waits for {self.at}")


def _note(action: str) -> None:
    RECORD.streams.append((threading.current_thread().name, action))


_OWN = threading.local()
MAIN_STREAM = PretendedStream("main stream")


class _Selected:
    def __init__(self, module: _Module, index: int) -> None:
        self._module, self._index, self._before = module, index, 0

    def __enter__(self) -> None:
        self._before = self._module.current_device()
        self._module.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        self._module.set_device(self._before)


def _number(device: Any) -> int:
    """Return the number of a device in any of its spellings; raises RuntimeError: none such."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    index = MODULE.current_device() if index is None else int(index)
    if index >= DEVICES:
        raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
    return index


MODULE = _Module()
_libraries: list[Any] = []


_library: Any = torch.library.Library


def register() -> None:
    """Give this process the pretended accelerator; once, and for good."""
    if _libraries:
        return
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
    rest = _library("_", "IMPL")
    rest.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    passed = _library("_", "IMPL")
    passed.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend([rest, passed, _autocast()])
    # Else `module.to(...)` would make new parameters, which no other accelerator does.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.tensor = _made(torch.tensor)
    torch.as_tensor = _made(torch.as_tensor)
    torch.accelerator.synchronize = MODULE.synchronize
    torch.accelerator.set_device_index = MODULE.set_device
    torch.accelerator.current_device_index = MODULE.current_device
    torch.accelerator.get_memory_info = MODULE.mem_get_info
    torch.accelerator.memory_allocated = MODULE.memory_allocated
    for index, generator in enumerate(GENERATORS):
        generator.index = index


def _made(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function that reads Python values put them on the accelerator."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return function(data, *args, device=device, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        return function(data, *args, **kwargs).to(device).requires_grad_(grad)

    return made


AUTOCAST = (
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d",
    "scaled_dot_product_attention",
)  # fmt: skip


def _autocast() -> Any:
    library = _library("aten", "IMPL", "AutocastPrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    for name in AUTOCAST:
        op = getattr(torch.ops.aten, name).default

        def cast(*args: Any, op: Any = op, **kwargs: Any) -> Any:
            lower = torch.get_autocast_dtype(NAME)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                args, kwargs = tree_map_only(
                    Tensor, lambda t: t.to(lower) if t.is_floating_point() else t, (args, kwargs)
                )
                return op(*args, **kwargs)

        library.impl(name, cast)
    return library
