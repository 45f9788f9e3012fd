"""Layout of a safetensors file: the same part gives the same bytes on any machine.

8 bytes with the length of the header, little endian; the header, JSON with every tensor's type,
shape and offsets, padded with spaces; the tensors without gaps. Wide types come first, so that
every tensor is aligned to its type and the first one to 8 bytes. Names are sorted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atoll.errors import CheckpointCorrupt, CheckpointError

TYPES: Mapping[torch.dtype, str] = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of tensors that a part can hold, and their names in the format."""

ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
"""The longest header that the `safetensors` library reads."""

MAX_DIMENSIONS = 64
"""The most dimensions that torch gives a tensor."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_DTYPES = {name: dtype for dtype, name in TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    end: int
    """Byte after the last."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's first bytes, and its tensors' spans in the order of their bytes."""

    head: bytes
    """Length and header."""
    places: tuple[TensorSpan, ...]
    nbytes: int
    """Size of the file."""
    metadata: Mapping[str, str]


def lay_out(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Layout:
    """Return the layout of tensors and texts; nothing is copied.

    Raises:
        CheckpointError: a tensor is not dense, or its type has no name in the format.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {}
    if metadata:
        header[_METADATA] = dict(sorted(metadata.items()))
    offset = 0
    spans: list[tuple[int, int]] = []
    for name, tensor in ordered:
        if tensor.dtype not in TYPES or tensor.layout != torch.strided:
            raise CheckpointError(
                f"tensor {name} cannot be saved",
                given=f"{tensor.dtype}, {tensor.layout}",
                expected="a dense tensor of a real number type that safetensors knows",
            )
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        spans.append((offset, end))
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    head = _LENGTH.pack(len(encoded)) + encoded
    places = tuple(
        TensorSpan(name, tensor.dtype, tuple(tensor.shape), len(head) + start, len(head) + end)
        for (name, tensor), (start, end) in zip(ordered, spans, strict=True)
    )
    return Layout(head, places, len(head) + offset, dict(metadata))


def read_layout(view: memoryview, *, name: str) -> Layout:
    """Return the layout of a file after checking every number in it.

    Args:
        view: The whole file as bytes; only its length is trusted.
        name: Name used in errors.

    Raises:
        CheckpointCorrupt: it is no safetensors file, or its tensors do not fill it exactly.
    """
    try:
        return _read(view)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointCorrupt(
            f"{name} cannot be read",
            given=f"{view.nbytes} bytes: {type(error).__name__}: {error}",
            expected="a safetensors file",
        ) from error


def _read(view: memoryview) -> Layout:
    (length,) = _LENGTH.unpack_from(view)
    if length > min(MAX_HEADER_BYTES, view.nbytes - _LENGTH.size):
        raise ValueError(f"a header of {length} bytes")
    head = bytes(view[: _LENGTH.size + length])
    header = json.loads(head[_LENGTH.size :])
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("the metadata are not all text")
    places = sorted(
        (_place(name, entry, len(head)) for name, entry in header.items()),
        key=lambda place: (place.start, place.end),
    )
    at = len(head)
    for place in places:
        if place.start != at:
            raise ValueError(f"tensor {place.name!r} begins at byte {place.start}, not {at}")
        at = place.end
    if at != view.nbytes:
        raise ValueError(f"its tensors end at byte {at}")
    return Layout(head, tuple(places), view.nbytes, metadata)


def _place(name: str, entry: Any, base: int) -> TensorSpan:
    """Return a tensor's span from its header entry, after checking it for consistency."""
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    numbers = (*shape, start, end)
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"the numbers of tensor {name!r} are not sizes")
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"tensor {name!r} has {end - start} bytes for shape {shape[:8]}")
    return TensorSpan(name, dtype, tuple(shape), base + start, base + end)
