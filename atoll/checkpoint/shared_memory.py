"""Shared memory: the trainer copies into it, the writer process reads it.

On Linux it is an anonymous file in memory (`memfd_create`): like one in /dev/shm, but without a
name and without that mount's size limit. The kernel frees it with the last of the two processes,
however they end. Without `memfd_create`, or if memory is short, a file on disk is mapped instead;
files of a killed process are deleted at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from atoll.checkpoint.files import storage_errors

logger = logging.getLogger(__name__)

PREFIX = ".image-"
"""Prefix of mapped files on disk."""

RESERVE_SHARE = 0.05
"""Share of the machine's memory that images leave free."""

SLACK = 128
"""A buffer is allocated larger by 1/128, so that small growth needs no new pages."""

PAGE_BYTES = 4096

_POPULATE = 23
"""MADV_POPULATE_WRITE: get all pages now instead of one by one at the first touch."""


class Region(msgspec.Struct, frozen=True):
    """The span of one part's file in shared memory."""

    name: str
    nbytes: int
    offset: int
    descriptor: int
    """Inherited by the writer; -1: open the path."""
    path: str


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """How another process opens the memory: by an inherited descriptor, or by a path."""

    descriptor: int
    """-1: use the path."""
    path: str


class SharedMemory:
    """A growing, reusable buffer; for one thread at a time.

    Args:
        scratch: Folder for a mapped file, if memory is short.
    """

    def __init__(self, *, scratch: Path) -> None:
        self._scratch = scratch
        self._anonymous = _anonymous_file()
        self._file: int | None = None
        self._path = ""
        self._mapping: mmap.mmap | None = None
        self._capacity = 0

    @property
    def inherited(self) -> int:
        """The descriptor that a writer process MUST inherit; -1: none."""
        return self._anonymous

    @property
    def place(self) -> SharedRegion:
        """Where the bytes are now."""
        return SharedRegion(-1, self._path) if self._path else SharedRegion(self._anonymous, "")

    def view(self, nbytes: int) -> memoryview:
        """Return so many writable bytes with undefined content.

        Earlier views MUST have been released.

        Raises:
            StorageFull: neither memory nor disk have room.
        """
        if self._mapping is None or nbytes > self._capacity:
            self._grow(nbytes)
        assert self._mapping is not None
        return memoryview(self._mapping)[:nbytes]

    def close(self) -> None:
        """Free the memory."""
        self._unmap()
        for descriptor in (self._anonymous, self._file):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._anonymous, self._file = -1, None
        if self._path:
            Path(self._path).unlink(missing_ok=True)

    def _grow(self, nbytes: int) -> None:
        self._unmap()
        # A header that is a few bytes longer the next time must not need new pages.
        nbytes += nbytes // SLACK + PAGE_BYTES
        more = nbytes - self._capacity
        if self._anonymous >= 0 and not self._path and memory_room() > more:
            os.ftruncate(self._anonymous, nbytes)
            self._map(self._anonymous, nbytes)
            return
        if self._anonymous >= 0 and not self._path:
            os.ftruncate(self._anonymous, 0)
        if self._file is None:
            self._scratch.mkdir(parents=True, exist_ok=True)
            self._file, self._path = tempfile.mkstemp(dir=self._scratch, prefix=PREFIX)
        logger.info("images of checkpoints lie in %s", self._path)
        with storage_errors(Path(self._path)):
            os.ftruncate(self._file, nbytes)
            if hasattr(os, "posix_fallocate"):  # a hole could not be filled later
                os.posix_fallocate(self._file, 0, nbytes)
        self._map(self._file, nbytes)

    def _map(self, descriptor: int, nbytes: int) -> None:
        self._mapping, self._capacity = mmap.mmap(descriptor, nbytes), nbytes
        for advice in (getattr(mmap, "MADV_HUGEPAGE", -1), _POPULATE):
            with contextlib.suppress(OSError, ValueError):  # this kernel does not support it
                if sys.platform.startswith("linux") and advice >= 0:
                    self._mapping.madvise(advice)

    def _unmap(self) -> None:
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # a view is in use: freed with it
                self._mapping.close()
        self._mapping = None


def memory_room() -> int:
    """Return how many more bytes this process may take without endangering other processes."""
    machine = psutil.virtual_memory()
    room = machine.available - int(machine.total * RESERVE_SHARE)
    return min(room, _group_room(Path("/sys/fs/cgroup")))


def remove_leftovers(scratch: Path) -> None:
    """Delete the mapped files of a killed process; call it only from its successor."""
    for path in scratch.glob(f"{PREFIX}*"):
        path.unlink(missing_ok=True)


def _group_room(group: Path) -> int:
    """Return how much the control group's limit (of a container) leaves."""
    try:
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        if limit == "max":
            return sys.maxsize
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        lines = (
            line.split()
            for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        cached = sum(
            int(value) for name, value in lines if name in ("inactive_file", "active_file")
        )
        return int(int(limit) * (1 - RESERVE_SHARE)) - used + cached
    except (OSError, ValueError):
        return sys.maxsize


def _anonymous_file() -> int:
    """Return the descriptor of an empty file in memory, or -1 where there is none."""
    try:
        return os.memfd_create("atoll-image")
    except (AttributeError, OSError):
        return -1
