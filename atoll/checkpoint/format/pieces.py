"""Files with pieces of tensors, as ranks and stages save them: what is in one, and how it is read.

Does not import `torch.distributed.checkpoint`, which takes most of a second, because members of a
SWARM and of DiPaCo use this, too.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from atoll.checkpoint.files import Written
from atoll.checkpoint.format.layout import TensorSpan, read_layout
from atoll.checkpoint.format.part import Part
from atoll.errors import CheckpointCorrupt
from atoll.wire.manifest import ManifestPart

PIECES = "pieces"
"""Key in a file's metadata: JSON, name -> where the piece begins and the size of its tensor."""


class ShardedInfo(msgspec.Struct, frozen=True):
    """Metadata of a sharded checkpoint."""

    step: int
    """Step of the schedule."""
    texts: dict[str, str] = {}
    """Text metadata, e.g. from `describe`."""
    numbers: dict[str, float] = {}
    ties: dict[str, str] = {}
    """Other names of a tensor -> the name under which it is saved, see `ties_of`; found
    automatically in a whole model."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tensor in a file."""

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    tensor: Tensor
    """The piece, memory-mapped from its file: only touched pages are read."""


@dataclass(slots=True)
class Cut:
    """A tensor and its pieces."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]

    def whole(self) -> Tensor:
        """Return the whole tensor, copied into main memory."""
        found = torch.empty(self.size, dtype=self.dtype)
        self.fill(found)
        return found

    def fill(self, target: Tensor) -> None:
        """Copy the pieces into a tensor of this size."""
        for piece in self.pieces:
            spans = zip(piece.offsets, piece.tensor.shape, strict=True)
            target[tuple(slice(start, start + length) for start, length in spans)] = piece.tensor


class Pieces:
    """The pieces in some files, by tensor name."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the headers; tensors are mapped, not read.

        Raises:
            CheckpointCorrupt: a file is not in this format, or pieces do not fill their tensors.
        """
        self.cuts: dict[str, Cut] = {}
        self.texts: list[dict[str, str]] = []
        for path in paths:
            with path.open("rb") as source:
                # Private pages: torch requires writable memory, although nothing writes to it.
                pages = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
            layout = read_layout(memoryview(pages), name=path.name)
            tensors = {place.name: _tensor(pages, place) for place in layout.places}
            self._add(Part(path.name, tensors, layout.metadata))
        self._check_filled()

    @classmethod
    def of_parts(cls, parts: Iterable[Part]) -> Pieces:
        """Return the pieces in parts that are in memory already.

        Raises:
            CheckpointCorrupt: a part is not in this format, or pieces do not fill their tensors.
        """
        found = cls(())
        for part in parts:
            found._add(part)
        found._check_filled()
        return found

    def _add(self, part: Part) -> None:
        """Add the pieces in a part, which are not copied."""
        self.texts.append(dict(part.metadata))
        for name, offsets, size in _places(part):
            piece = part.tensors[name]
            cut = self.cuts.setdefault(name, Cut(size, piece.dtype, []))
            cut.pieces.append(Piece(offsets, piece))
            if (cut.size, cut.dtype) != (size, piece.dtype):
                raise _odd(part.name, name, "its pieces are inconsistent")

    def _check_filled(self) -> None:
        for name, cut in self.cuts.items():
            held = sum(piece.tensor.numel() for piece in cut.pieces)
            if held != torch.Size(cut.size).numel():
                raise _odd("the checkpoint", name, f"{held} of {cut.size} are there")
            if _overlap(cut.pieces):
                raise _odd("the checkpoint", name, "pieces overlap, so that others are missing")


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Return whether two pieces of a tensor have an element in common."""
    boxes = sorted(
        [(start, start + length) for start, length in zip(p.offsets, p.tensor.shape, strict=True)]
        for p in pieces
        if p.tensor.numel()
    )
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # so do all after it
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
    return False


def _places(part: Part) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield each piece's name, offsets and its tensor's size, all numbers checked."""
    try:
        places = json.loads(part.metadata[PIECES])
        for name, piece in part.tensors.items():
            offsets, size = (tuple(map(int, numbers)) for numbers in places[name])
            spans = list(zip(offsets, piece.shape, size, strict=True))
            if any(start < 0 or start + length > whole for start, length, whole in spans):
                raise ValueError(f"{name} is outside of its tensor")
            yield name, offsets, size
    except (KeyError, ValueError, TypeError) as error:
        raise _odd(part.name, "", str(error)) from error


def _tensor(pages: mmap.mmap, place: TensorSpan) -> Tensor:
    count = (place.end - place.start) // place.dtype.itemsize
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(pages, dtype=place.dtype, count=count, offset=place.start)
    return flat.view(place.shape)


def _odd(file: str, name: str, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{file} is not a part of a sharded checkpoint", given=f"{name}: {why}".removeprefix(": "),
        expected="pieces of tensors, as ranks save them",
    )  # fmt: skip


def entry(name: str, member: str, written: Written) -> ManifestPart:
    """Return the entry of a written file in a manifest."""
    return ManifestPart(name=name, member=member, sha256=written.sha256, nbytes=written.nbytes)
