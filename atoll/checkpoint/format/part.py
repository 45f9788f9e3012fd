"""One file of a checkpoint: tensors and text in safetensors format, written as a stream.

The `safetensors` package reads the files. Its writer needs all bytes in memory at once or does not
flush to disk, so writing is implemented here; see `layout` for the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from atoll.checkpoint.files import Buffer
from atoll.checkpoint.format.layout import lay_out
from atoll.errors import CheckpointCorrupt
from atoll.task import RemoteState
from atoll.wire.manifest import SHARED_PART, member_part

__all__ = ["SHARED", "STATE", "Part", "member_part", "part_blocks", "read_part"]

SHARED = SHARED_PART
"""The part that is equal for all members: model and outer state."""

STATE = "state"
"""Key in a part's metadata: digest of the model that all parts of a checkpoint belong to."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint, in memory."""

    name: str
    """File name, `shared.safetensors` or `w3.safetensors`."""
    tensors: Mapping[str, Any]
    """A :class:`RemoteState` is fetched when its bytes are written, one at a time."""
    metadata: Mapping[str, str] = field(default_factory=dict)


def part_blocks(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield the bytes of a safetensors file, tensor by tensor.

    Raises:
        CheckpointError: the format has no name for a tensor's type.
    """
    layout = lay_out(tensors, metadata)
    yield layout.head
    for place in layout.places:
        tensor = tensors[place.name]
        if isinstance(tensor, RemoteState):
            tensor = tensor.fetch()
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data
            del flat, tensor  # free it before the next one arrives


def read_part(path: Path) -> Part:
    """Return the part in a safetensors file.

    Raises:
        CheckpointCorrupt: it is no safetensors file, or its structure is damaged.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
            return Part(path.name, tensors, source.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{path.name} cannot be read", given=f"{path}: {error}", expected="a safetensors file"
        ) from error
