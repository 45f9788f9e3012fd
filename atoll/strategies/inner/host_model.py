"""The whole model in the first rank's main memory, a copy of what the ranks train.

Vectors in files that are mapped into memory, for a first rank on a machine with little memory.

The host model and the state of the outer strategy are needed in rounds only: they need not occupy
memory for the hundreds of steps between two of them. In mapped files it is read when it is used,
and the system takes the memory for something else in between. The numbers are the same to the bit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import StorageFull
from atoll.island.command_broadcaster import CommandBroadcaster

PULL, PUSH = "pull", "push"
"""Verbs of :class:`atoll.strategies.inner.worker.Worker`."""


class HostModel:
    """`Task.elsewhere` of an island's first rank; see :class:`atoll.task.HeldElsewhere`.

    Both ways are exact, bit for bit. From the thread that trains only.
    """

    def __init__(self, broadcaster: CommandBroadcaster, *, vector: Tensor | None = None) -> None:
        """Take the host model for up to date.

        Args:
            broadcaster: The ranks that train.
            vector: What `in_one_piece` returned for all that members agree on.
        """
        self._broadcaster, self._vector = broadcaster, vector
        self._old = False

    def trained(self) -> None:
        """Note that the ranks have trained: the host model is out of date."""
        self._old = True

    def pull(self) -> None:
        """Copy the trained parts into the host model, if the ranks have trained since."""
        if self._old:
            self._broadcaster.call(PULL)
            self._old = False

    def push(self) -> None:
        """Copy the host model into the ranks' parts."""
        self._broadcaster.call(PUSH)
        self._old = False

    @property
    def vector(self) -> Tensor | None:
        """The host model's memory; see :meth:`atoll.task.HeldElsewhere.vector`."""
        return self._vector

    def spoil(self) -> None:
        """Force the next `pull` to copy: the caller overwrites the host model's memory."""
        self._old = True


@torch.no_grad()
def in_one_piece(
    tensors: Sequence[Tensor], *, new: Callable[[int], Tensor] = torch.empty
) -> Tensor | None:
    """Let tensors lie one behind the other in one vector, and return it; their numbers stay.

    None, and nothing is moved, if they are not all of fp32 and in main memory.

    Args:
        tensors: Parameters and buffers.
        new: Makes a vector of so many elements.
    """
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return None
    vector = new(sum(tensor.numel() for tensor in tensors))
    pieces = torch.split(vector, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        piece.copy_(tensor.reshape(-1))
        tensor.data = piece.view(tensor.shape)
    return vector


LEAST_BYTES = 1 << 16
"""Smaller tensors stay in memory."""


class HostModelOnDisk:
    """Vectors of one process; the files go with it, however it ends, where the system can."""

    def __init__(self, folder: Path, *, least_bytes: int = LEAST_BYTES) -> None:
        """Put files into a folder; tensors below `least_bytes` stay where they are."""
        self._folder, self._least_bytes = folder, least_bytes
        self._vectors: dict[int, Tensor] = {}
        """By their storage."""

    @property
    def nbytes(self) -> int:
        """Bytes that lie in files."""
        return sum(vector.nbytes for vector in self._vectors.values())

    def new(self, elements: int) -> Tensor:
        """Return a float32 vector in a file of its own.

        Raises:
            StorageFull: there is no room on the disk.
        """
        return self._mapped(elements, torch.float32)

    def take(self, tensors: Iterable[Tensor], *, besides: Iterable[Tensor] = ()) -> None:
        """Move what tensors hold into files, in place, if it is large and not there yet.

        No other thread may use them meanwhile. Those that share their memory go on sharing it.

        Args:
            tensors: All that refer to the memory they are in; those of other devices stay.
            besides: What shares memory with these stays.

        Raises:
            StorageFull: there is no room on the disk.
        """
        tensors, besides = list(tensors), list(besides)
        known = {*self._vectors, *map(_key, besides)}
        found: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            large = tensor.untyped_storage().nbytes() >= self._least_bytes
            if large and tensor.device.type == "cpu" and _key(tensor) not in known:
                found.setdefault(_key(tensor), []).append(tensor)
        for alike in found.values():
            old: Any = alike[0].untyped_storage()
            new = self._mapped(old.nbytes() // alike[0].element_size(), alike[0].dtype)
            new.untyped_storage().copy_(old)
            with torch.no_grad():
                for tensor in alike:
                    tensor.set_(
                        new.untyped_storage(), tensor.storage_offset(), tensor.shape,
                        tensor.stride(),
                    )  # fmt: skip
        alive = {_key(tensor) for tensor in (*tensors, *besides)}
        self._vectors = {key: v for key, v in self._vectors.items() if key in alive}

    def let_go(self) -> None:
        """Take the pages out of this process; the next use reads them from the file."""
        if not sys.platform.startswith("linux"):
            return
        system = ctypes.CDLL(None, use_errno=True)
        for vector in self._vectors.values():
            start, length = ctypes.c_void_p(vector.data_ptr()), ctypes.c_size_t(vector.nbytes)
            system.madvise(start, length, mmap.MADV_DONTNEED)

    def _mapped(self, elements: int, dtype: torch.dtype) -> Tensor:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".vector-") as file:
                _reserve(file.fileno(), elements * dtype.itemsize)
                vector = torch.from_file(file.name, shared=True, size=elements, dtype=dtype)
        except OSError as error:
            raise StorageFull(
                "the disk has no room for what an island's first rank keeps there",
                given=f"{self._folder}: {error.strerror}, {elements * dtype.itemsize} bytes",
                remedy='make room, or leave out memory = "disk" in [island]',
            ) from error
        self._vectors[_key(vector)] = vector
        return vector


def _reserve(descriptor: int, nbytes: int) -> None:
    """Make a file so long that its pages are there: a full disk is an error now, not a signal."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
