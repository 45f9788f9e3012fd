"""Serialize queue payloads without pickle, so that an item cannot run code.

    bytes                               as they are
    JSON values                         MAGIC "j", then JSON
    tensors or arrays by name           MAGIC "t" (torch) or "n" (numpy), then safetensors

A payload that does not begin with the magic is bytes: what other programs put over HTTP.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import ConfigError, DataError
from atoll.wire.queue_messages import PAYLOAD_MAGIC

MAGIC = PAYLOAD_MAGIC
_HEAD = len(MAGIC) + 1

Parts = Sequence[bytes | memoryview]
"""A payload in pieces, so that large arrays are not copied."""

_TO_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip


def encode(value: Any) -> Parts:
    """Return the pieces of a value's payload.

    Raises:
        ConfigError: it is neither bytes, nor JSON, nor a dict of tensors or arrays.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        return (MAGIC + b"b", raw) if raw.startswith(MAGIC) else (raw,)
    if isinstance(value, Mapping) and value:
        kind = _kind_of(list(value.values()))
        if kind:
            return (MAGIC + kind.encode(), *_safetensors(value, kind=kind))
    try:
        return (MAGIC + b"j", json.dumps(value, separators=(",", ":"), allow_nan=True).encode())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "this value cannot be put into a queue",
            given=f"{type(value).__name__} ({error})",
            expected="bytes, JSON values, or a dict of tensors or numpy arrays",
        ) from error


def decode(payload: bytes) -> Any:
    """Return the value of a payload.

    Raises:
        DataError: it has the magic but is damaged.
    """
    if not payload.startswith(MAGIC):
        return payload
    kind, body = payload[len(MAGIC) : _HEAD], payload[_HEAD:]
    try:
        if kind == b"b":
            return body
        if kind == b"j":
            return json.loads(body)
        if kind == b"n":
            import safetensors.numpy

            return safetensors.numpy.load(body)
        if kind == b"t":
            import safetensors.torch

            return safetensors.torch.load(body)
    except (ValueError, KeyError, RecursionError) as error:
        raise _damaged(error) from error
    except Exception as error:  # safetensors has an exception class of its own in compiled code
        if type(error).__name__ == "SafetensorError":
            raise _damaged(error) from error
        raise
    raise _damaged(f"kind {kind!r}")


def decode_file(path: Path) -> Any:
    """Return the value of a payload in a file; see `decode`."""
    return decode(path.read_bytes())


def size(parts: Parts) -> int:
    """Return the bytes of a payload."""
    return sum(memoryview(part).nbytes for part in parts)


def _damaged(why: object) -> DataError:
    return DataError(
        "an item of a queue is damaged",
        given=str(why)[:200],
        expected="an item that run.queue has put",
    )


def _kind_of(values: Sequence[Any]) -> str:
    """Return `t` for tensors, `n` for numpy arrays, else an empty text."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and all(isinstance(value, torch.Tensor) for value in values):
        return "t"
    if numpy is not None and all(isinstance(value, numpy.ndarray) for value in values):
        return "n"
    return ""


def _safetensors(arrays: Mapping[str, Any], *, kind: str) -> Parts:
    """Return a safetensors file in pieces: its header, then each array without a copy."""
    header: dict[str, Any] = {}
    pieces: list[memoryview] = []
    offset = 0
    for name, array in arrays.items():
        dtype, piece = _tensor(array) if kind == "t" else _array(array)
        if dtype not in _TO_SAFETENSORS:
            raise ConfigError(
                "an array of this type cannot be put into a queue",
                given=f"{name}: {dtype}",
                expected="one of " + ", ".join(_TO_SAFETENSORS),
            )
        nbytes = piece.nbytes
        header[str(name)] = {
            "dtype": _TO_SAFETENSORS[dtype],
            "shape": [int(n) for n in array.shape],
            "data_offsets": [offset, offset + nbytes],
        }
        pieces.append(piece)
        offset += nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return (len(text).to_bytes(8, "little") + text, *pieces)


def _tensor(tensor: Any) -> tuple[str, memoryview]:
    import torch

    plain = tensor.detach().to("cpu").contiguous()
    dtype = str(plain.dtype).removeprefix("torch.")
    flat = plain.reshape(-1).view(torch.uint8) if math.prod(plain.shape) else plain.new_empty(0)
    return dtype, memoryview(flat.numpy()).cast("B") if flat.numel() else memoryview(b"")


def _array(array: Any) -> tuple[str, memoryview]:
    import numpy as np

    plain = np.ascontiguousarray(array)
    if plain.dtype.byteorder == ">":
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    flat = plain.reshape(-1).view(np.uint8) if plain.size else np.empty(0, np.uint8)
    return plain.dtype.name, flat.data
