"""A pretended accelerator: torch's place for private backends, filled with tensors in main memory.

Its tensors refuse to be computed with those of the processor, are read by copies only, and every
operator on them is noted in `RECORD`. `registration.py` makes it a device of the process.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from tests.accelerator.cells import CELLS

NAME = "pretended"
DEVICES = int(os.environ.get("PRETENDED_DEVICES", "1"))
"""Only the first computes gradients: torch asks a private backend for one."""
MEMORY_BYTES = 8 << 30


@dataclass(slots=True)
class Record:
    """What ran on the pretended accelerator, and what it pretends not to have."""

    operators: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Operator, e.g. `mm`, and number of the device -> how often."""
    to_host: Counter[str] = field(default_factory=Counter)
    """`copy` and `item` -> how often values went to main memory."""
    readers: Counter[str] = field(default_factory=Counter)
    """Name of a thread -> how often it waited for values to come to main memory."""
    streams: list[tuple[str, str]] = field(default_factory=list)
    """Name of a thread, and what it did with a stream or an event of the device."""
    missing_dtypes: set[torch.dtype] = field(default_factory=set)
    """Number types that it has not, as Apple's lacks float64."""
    missing_operators: set[str] = field(default_factory=set)
    """Operators that it has not."""

    def clear(self) -> None:
        """Forget what ran, and have every number type and operator again."""
        self.operators.clear()
        self.to_host.clear()
        self.readers.clear()
        self.streams.clear()
        self.missing_dtypes.clear()
        self.missing_operators.clear()

    def ran(self, operator: str, index: int | None = None) -> int:
        """Return how often an operator ran on one device, or on all."""
        return sum(
            times for (name, at), times in self.operators.items()
            if name == operator and index in (None, at)
        )  # fmt: skip


RECORD = Record()
_RAW: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""The memory behind the tensors that are alive."""

COPIES = {"copy_", "_to_copy", "_copy_from"}
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
"""Operators whose indices may be in main memory."""
JOINS = {"cat", "stack"}
FUSED = "_fused_"


class PretendedTensor(Tensor):
    """A tensor that says it is on the accelerator; `raw` holds its values in main memory."""

    raw: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, index: int = 0) -> PretendedTensor:
        if raw.dtype in RECORD.missing_dtypes:
            raise TypeError(
                f"Cannot convert a {NAME} Tensor to {raw.dtype} dtype as the {NAME} framework "
                f"doesn't support {raw.dtype}. Please use float32 instead."
            )
        made: PretendedTensor = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=torch.device(NAME, index),
        )  # fmt: skip
        made.raw = raw
        _RAW[id(raw)] = raw
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {self.device}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = PretendedTensor(self.raw.clone(), self.device.index)
            made.requires_grad_(self.requires_grad)
            rest = {key: value for key, value in self.__dict__.items() if key != "raw"}
            made.__dict__.update(copy.deepcopy(rest, memo))
            if self.grad is not None:
                made.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = made
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be written as a tensor of main memory, whoever reads it."""
        RECORD.to_host["copy"] += 1
        return self.raw.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def tolist(self) -> Any:
        RECORD.to_host["copy"] += 1
        return self.raw.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        device = options.pop("device", self.device)
        dtype = options.pop("dtype", None) or self.dtype
        return torch.tensor(data, dtype=dtype, device=device, **options)

    @property
    def data(self) -> Tensor:
        found: Tensor = _BASE_DATA.__get__(self)
        return found

    @data.setter
    def data(self, values: Tensor) -> None:
        _BASE_DATA.__set__(self, values)
        if isinstance(values, PretendedTensor):
            self.raw = values.raw


_BASE_DATA: Any = Tensor.data


def _indices(index: Any) -> Any:
    """Return an index with lists as tensors: torch would make those beside the dispatcher."""
    if isinstance(index, tuple):
        return tuple(_indices(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def allocated_bytes() -> int:
    """Return the bytes of all tensors that are alive on the accelerator."""
    storages = {raw.untyped_storage()._cdata: raw.untyped_storage() for raw in _RAW.values()}
    return sum(storage.nbytes() for storage in storages.values())


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the memory behind its tensors; called for any that touches the device."""
    name = func.overloadpacket.__name__
    if name == "_has_compatible_shallow_copy_type":
        return _on_device(args[0]) and _on_device(args[1])
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    wanted = kwargs.get("device")
    target = None if wanted is None else torch.device(wanted)
    index = _common(name, args, tensors)
    if index is None:
        index = (target.index or 0) if target is not None else 0
    _refuse(name, kwargs, tensors, index)
    on_device = target is None or target.type == NAME
    if on_device and target is not None and target.index is not None:
        index = target.index
    known: dict[int, Tensor] = {}
    for tensor in tensors:
        raw = tensor.raw if isinstance(tensor, PretendedTensor) else tensor
        known[id(raw)] = tensor
    raw_args, raw_kwargs = tree_map_only(PretendedTensor, lambda t: t.raw, (args, kwargs))
    if target is not None:
        raw_kwargs["device"] = torch.device("cpu")
        raw_kwargs.pop("pin_memory", None)
    if not on_device or (name == "copy_" and not _on_device(args[0])):
        RECORD.to_host["copy"] += 1
        RECORD.readers[threading.current_thread().name] += 1
    elif name in ("_local_scalar_dense", "equal"):
        RECORD.to_host["item"] += 1
    else:
        RECORD.operators[name, index] += 1
    with _OwnRandomNumbers(func, index, raw_kwargs):
        found = CELLS.get(name, func)(*raw_args, **raw_kwargs)
    for tensor in tensors:
        _refresh(tensor)

    def wrapped(raw: Tensor) -> Tensor:
        if id(raw) in known:
            return known[id(raw)]
        return PretendedTensor(raw, index) if on_device else raw

    if name == "copy_":
        return args[0]
    return tree_map_only(Tensor, wrapped, found)


def _on_device(tensor: Tensor) -> bool:
    return isinstance(tensor, PretendedTensor)


def _common(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> int | None:
    """Return the device's number of an operator; raises RuntimeError if tensors are elsewhere."""
    if name in COPIES:
        first = args[0] if _on_device(args[0]) else args[1] if len(args) > 1 else None
        return first.device.index if isinstance(first, PretendedTensor) else None
    indices = args[1] if name in INDEXED else ()
    free = [id(value) for value in tree_iter(indices) if isinstance(value, Tensor)]
    places: set[torch.device] = set()
    for tensor in tensors:
        scalar = tensor.dim() == 0 and name not in JOINS and not _on_device(tensor)
        if not scalar and id(tensor) not in free:
            places.add(tensor.device)
    if len(places) > 1:
        several = " and ".join(sorted(map(str, places)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{several}! (when checking the tensors of {name})"
        )
    if any(place.type != NAME for place in places):
        raise RuntimeError(f"{name}: indices on {NAME} for a tensor in main memory")
    return next((place.index for place in places), None)


def _refuse(name: str, kwargs: dict[str, Any], tensors: list[Tensor], index: int) -> None:
    if name.startswith(FUSED) or name in RECORD.missing_operators:
        raise NotImplementedError(
            f"The operator 'aten::{name}' is not currently implemented for the {NAME} device."
        )
    if index >= DEVICES:
        raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'"
        )


def _refresh(tensor: Tensor) -> None:
    """Give a tensor the shape that an operator in place gave to its memory."""
    if isinstance(tensor, PretendedTensor) and (
        tensor.shape != tensor.raw.shape or tensor.stride() != tensor.raw.stride()
    ):
        with torch.no_grad():
            _BASE_DATA.__set__(tensor, PretendedTensor(tensor.raw, tensor.device.index))


class _OwnRandomNumbers:
    """Draws random numbers from the device's own generator."""

    def __init__(self, func: Any, index: int, kwargs: dict[str, Any]) -> None:
        self._own = None
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self._own = GENERATORS[index]
        self._before = torch.empty(0)

    def __enter__(self) -> None:
        if self._own is not None:
            self._before = torch.default_generator.get_state()
            torch.default_generator.set_state(self._own.get_state())

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(self._before)


class PretendedGenerator(torch._C.Generator):
    """Random numbers of a device."""

    index: int = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, self.index)


GENERATORS = [PretendedGenerator() for _ in range(DEVICES)]
