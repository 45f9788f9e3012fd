"""One file of a checkpoint: tensors and text, in the safetensors format, written as a stream.

safetensors: 8 bytes with the length of a JSON header, little endian; the header, which names every
tensor with its type, shape and place; the tensors one after the other. Reading is left to the
`safetensors` package. Its writer needs all bytes in memory at once or flushes nothing to disk, so
writing is done here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.checkpoint.files import Buffer
from atoll.errors import CheckpointCorrupt, CheckpointError

SHARED = "shared.safetensors"
"""The part that is the same for everybody: model and outer state."""

STATE = "state"
"""Key in a part's metadata: digest of the model that all parts of a checkpoint belong to."""

SUFFIX = ".safetensors"

_TYPES: Mapping[torch.dtype, str] = {
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
_ALIGNMENT = 8


def member_part(member: str) -> str:
    """Return the name of the part that a member writes."""
    return member + SUFFIX


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint, in memory."""

    name: str
    """File name, `shared.safetensors` or `w3.safetensors`."""
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def part_blocks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield the bytes of a safetensors file, tensor by tensor.

    Raises:
        CheckpointError: a tensor's type has no name in the format.
    """
    # Wide types first: then every tensor is aligned without gaps, which the format forbids.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _TYPES:
            raise CheckpointError(
                f"tensor {name} cannot be saved",
                given=str(tensor.dtype),
                expected="a real number type that safetensors knows",
            )
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield struct.pack("<Q", len(encoded)) + encoded
    for _, tensor in ordered:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def read_part(path: Path) -> Part:
    """Return the part in a safetensors file.

    Raises:
        CheckpointCorrupt: it is no such file, or damaged where its form shows it.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
            return Part(path.name, tensors, source.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{path.name} cannot be read", given=f"{path}: {error}", expected="a safetensors file"
        ) from error
