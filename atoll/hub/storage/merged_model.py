"""The model of a checkpoint in stages as one safetensors file, without torch and in little memory.

A file of a stage holds whole tensors, so their bytes are copied from file to file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import WireError
from atoll.wire.manifest import MODEL_PREFIX
from atoll.wire.part_header import LENGTH, read_header

BLOCK_BYTES = 2**20
ALIGNMENT = 8
LONGEST_DTYPE = 16


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor's bytes in a file."""

    path: Path
    start: int
    nbytes: int


async def merged_model(files: Sequence[Path], texts: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield a safetensors file with all tensors of the model in these files.

    Args:
        files: Of all stages.
        texts: Metadata, e.g. the description of the model.

    Raises:
        WireError: a file is not a part of a checkpoint.
    """
    blocks = _blocks(files, texts)
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


def _blocks(files: Sequence[Path], texts: Mapping[str, str]) -> Iterator[bytes]:
    entries: dict[str, tuple[dict[str, Any], _Span]] = {}
    for path in files:
        with path.open("rb") as source:
            header, begin = read_header(source, nbytes=path.stat().st_size, name=path.name)
        for name, entry in header.items():
            if name.startswith(MODEL_PREFIX):
                start, end = _offsets(entry, path=path)
                span = _Span(path, begin + start, end - start)
                entries[name.removeprefix(MODEL_PREFIX)] = entry, span
    # Large types first, as in other files of Atoll: every tensor is then aligned to its type.
    order = sorted(entries, key=lambda name: (-_bits(entries[name][0]), name))
    merged: dict[str, Any] = {"__metadata__": dict(texts)}
    offset = 0
    for name in order:
        entry, span = entries[name]
        merged[name] = {**entry, "data_offsets": [offset, offset + span.nbytes]}
        offset += span.nbytes
    head = msgspec.json.encode(merged)
    head += b" " * (-len(head) % ALIGNMENT)
    yield LENGTH.pack(len(head)) + head
    for name in order:
        yield from _read(entries[name][1])


def _offsets(entry: object, *, path: Path) -> tuple[int, int]:
    """Return where a tensor begins and ends; its entry is written by a member of the job."""
    match entry:
        case {"dtype": str(dtype), "data_offsets": [int(start), int(end)]}:
            if len(dtype) <= LONGEST_DTYPE and 0 <= start <= end:
                return start, end
    raise WireError(
        f"{path.name} is not a part of a checkpoint",
        given=repr(entry)[:200],
        expected="a type and two ascending offsets for each tensor",
    )


def _bits(entry: Mapping[str, Any]) -> int:
    """Return the width of a tensor's type, e.g. 32 for F32 and 16 for BF16."""
    digits = "".join(letter for letter in entry["dtype"] if letter.isdecimal())
    return int(digits) if digits else 8


def _read(span: _Span) -> Iterator[bytes]:
    with span.path.open("rb") as source:
        source.seek(span.start)
        left = span.nbytes
        while left > 0:
            block = source.read(min(left, BLOCK_BYTES))
            if not block:
                raise EOFError(f"{span.path} became shorter while it was read")
            left -= len(block)
            yield block
