"""The host model: rank 0's copy, in main memory, of the model that the ranks train.

Host model and outer state are needed in rounds only. With vectors in memory-mapped files they do
not occupy memory in the hundreds of steps between two rounds. The numbers are bitwise the same.
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
    """`Task.elsewhere` of an island's rank 0; see :class:`atoll.task.HeldElsewhere`.

    Copies are exact in both directions. For the training thread only.
    """

    def __init__(
        self,
        broadcaster: CommandBroadcaster,
        *,
        vector: Tensor | None = None,
        constrained: bool = False,
    ) -> None:
        """Represent what the ranks have been given.

        `vector` is the result of `in_one_piece` for the shared state; `constrained` means that the
        ranks change what they are given, so that it is out of date at once.
        """
        self._broadcaster, self._vector = broadcaster, vector
        self._old = self._constrained = constrained

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
        self._old = self._constrained

    @property
    def vector(self) -> Tensor | None:
        """The host model's memory; see :meth:`atoll.task.HeldElsewhere.vector`."""
        return self._vector

    def spoil(self) -> None:
        """Force the next `pull` to copy, because the caller overwrites the host model's memory."""
        self._old = True


@torch.no_grad()
def in_one_piece(
    tensors: Sequence[Tensor], *, new: Callable[[int], Tensor] = torch.empty
) -> Tensor | None:
    """Move tensors into one contiguous vector made by `new`, and return it; their values stay.

    None, and no change, unless all of them are fp32 in main memory.
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
    """Vectors of one process in files, which the system deletes with the process where possible."""

    def __init__(self, folder: Path, *, least_bytes: int = LEAST_BYTES) -> None:
        """Put files into a folder; tensors below `least_bytes` stay in memory."""
        self._folder, self._least_bytes = folder, least_bytes
        self._vectors: dict[int, Tensor] = {}
        """By their storage."""

    @property
    def nbytes(self) -> int:
        """Bytes in files."""
        return sum(vector.nbytes for vector in self._vectors.values())

    def new(self, elements: int) -> Tensor:
        """Return a float32 vector in its own file; raises StorageFull if the disk is full."""
        return self._mapped(elements, torch.float32)

    def take(self, tensors: Iterable[Tensor], *, besides: Iterable[Tensor] = ()) -> None:
        """Move large CPU tensors into files, in place, unless they share memory with `besides`.

        The tensors MUST be all that refer to their memory, and no other thread may use them
        meanwhile. Tensors that share memory continue to share it. Raises StorageFull if the disk is
        full.
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
        """Evict the pages from this process; the next use reads them from the file."""
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
                "no disk space is left for the state of an island's first rank",
                given=f"{self._folder}: {error.strerror}, {elements * dtype.itemsize} bytes",
                remedy='make room, or leave out memory = "disk" in [island]',
            ) from error
        self._vectors[_key(vector)] = vector
        return vector


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate a file's blocks: a full disk raises an error now instead of a signal later."""
    if not nbytes:  # posix_fallocate refuses 0
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
