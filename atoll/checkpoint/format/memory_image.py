"""A part as the bytes of its file, in memory, made by one copy of the tensors.

The tensors must not change during the copy. The image has its own memory or uses a given buffer,
e.g. shared memory that another process writes to disk.
"""

from __future__ import annotations

from mmap import mmap
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from atoll.checkpoint.files import Buffer
from atoll.checkpoint.format.layout import TensorSpan, lay_out, read_layout
from atoll.checkpoint.format.part import Part
from atoll.devices.transfer import copy_tensors
from atoll.errors import CheckpointError


class MemoryImage:
    """The bytes of one part's safetensors file; equal parts give equal bytes."""

    def __init__(self, part: Part, *, buffer: Buffer | mmap | None = None) -> None:
        """Copy a part; every tensor is copied once.

        Args:
            part: Its tensors MUST NOT change meanwhile; any device, contiguous or not.
            buffer: Writable memory of at least `image_nbytes(part)` bytes, aligned to 8 bytes as
                mapped files are; None: new memory.

        Raises:
            CheckpointError: a tensor's type cannot be saved, or the buffer is too small.
        """
        layout = lay_out(part.tensors, part.metadata)
        if buffer is None:
            # torch's memory is aligned, and is not zeroed first.
            whole = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
        else:
            whole = memoryview(buffer).cast("B")
        if whole.readonly or whole.nbytes < layout.nbytes:
            raise CheckpointError(
                f"{part.name} does not fit the buffer it should go to",
                given=f"{whole.nbytes} bytes{', read only' if whole.readonly else ''}",
                expected=f"{layout.nbytes} writable bytes",
            )
        self.name = part.name
        """File name of the part."""
        self.nbytes = layout.nbytes
        self._view: memoryview | None = whole[: layout.nbytes]
        self._view[: len(layout.head)] = layout.head
        filled = [place for place in layout.places if place.end > place.start]
        with torch.no_grad():
            targets = [_tensor(self._view, place) for place in filled]
            sources = [part.tensors[place.name] for place in filled]
            copy_tensors(targets, sources)

    @property
    def view(self) -> memoryview:
        """The bytes of the file, not a copy.

        Raises:
            CheckpointError: it was released.
        """
        if self._view is None:
            raise CheckpointError("an image was used after its release", given=self.name)
        return self._view

    def release(self) -> None:
        """Release the memory; existing views stay valid."""
        self._view = None

    def __enter__(self) -> Self:
        """Return itself; leaving the block releases it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def image_nbytes(part: Part) -> int:
    """Return the exact size of a part's image.

    Raises:
        CheckpointError: a tensor's type cannot be saved.
    """
    return lay_out(part.tensors, part.metadata).nbytes


def part_of(buffer: Buffer | mmap, name: str) -> Part:
    """Return the part whose file is in a buffer.

    Its tensors are views into a writable buffer and keep it alive: a mapped file cannot be closed
    before they are released. From a read-only buffer, which torch cannot represent, they are
    copied.

    Args:
        buffer: The whole file and nothing else. No number in it is trusted.
        name: Name of the part.

    Raises:
        CheckpointCorrupt: it is not a whole safetensors file.
    """
    view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
    layout = read_layout(view, name=name)
    if view.readonly:
        owned = torch.empty(view.nbytes, dtype=torch.uint8).numpy().data
        owned[:] = view
        view = owned
    tensors = {place.name: _tensor(view, place) for place in layout.places}
    return Part(name, tensors, layout.metadata)


def _tensor(view: memoryview, place: TensorSpan) -> Tensor:
    """Return a tensor that is a piece of a buffer."""
    if place.start == place.end:  # torch refuses to begin behind the last byte
        return torch.empty(place.shape, dtype=place.dtype)
    if place.start % place.dtype.itemsize:  # other writers do not align: it cannot be viewed
        owned = bytearray(view[place.start : place.end])
        return torch.frombuffer(owned, dtype=place.dtype).view(place.shape)
    count = (place.end - place.start) // place.dtype.itemsize
    whole = torch.frombuffer(view, dtype=place.dtype, count=count, offset=place.start)
    return whole.view(place.shape)
