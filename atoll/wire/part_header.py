"""The header of a checkpoint part, read without its tensors and without torch.

A part is a safetensors file: the length of a JSON header (8 bytes, little endian), the header, the
tensors. Atoll's own entries are in `__metadata__`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from atoll.errors import WireError
from atoll.wire.manifest import SCORE, STAMP

MAX_HEADER_BYTES = 100_000_000
"""Limit of the `safetensors` library."""

LENGTH = struct.Struct("<Q")


def read_header(source: BinaryIO, *, nbytes: int, name: str) -> tuple[dict[str, Any], int]:
    """Return the header of an open safetensors file and the offset of its tensors.

    Args:
        source: The file, at its beginning.
        nbytes: Size of the whole file.
        name: Name of the file in errors.

    Raises:
        WireError: it is not a safetensors file, or truncated.
    """
    try:
        (length,) = LENGTH.unpack(source.read(LENGTH.size))
        if length > min(MAX_HEADER_BYTES, nbytes - LENGTH.size):
            raise ValueError(f"a header of {length} bytes")
        header = msgspec.json.decode(source.read(length), type=dict[str, Any])
        begin = LENGTH.size + length
        tensors = [entry for key, entry in header.items() if key != "__metadata__"]
        end = begin + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        if end != nbytes:
            raise ValueError(f"its tensors end at byte {end}")
    except (struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(
            f"{name} is not a part of a checkpoint",
            given=f"{nbytes} bytes: {error}",
            expected="a whole safetensors file",
        ) from error
    return header, begin


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a part; empty if it is missing or damaged."""
    try:
        with path.open("rb") as source:
            header, _ = read_header(source, nbytes=path.stat().st_size, name=path.name)
    except (OSError, WireError):
        return {}
    texts = header.get("__metadata__")
    return {str(k): str(v) for k, v in texts.items()} if isinstance(texts, dict) else {}


def read_stamp(path: Path) -> str:
    """Return the stamp of a part on disk; empty if it is missing or damaged."""
    return read_metadata(path).get(STAMP, "")


def read_score(path: Path) -> float | None:
    """Return the held-out loss in a shared part, or None."""
    try:
        score = float(read_metadata(path).get(SCORE, "nan"))
    except ValueError:
        return None
    return score if math.isfinite(score) else None
