"""A real file system of a few megabytes, to fill up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, *, nbytes: int) -> Iterator[None]:
    """Mount a disk of that size in memory; skips the test where this process may not mount."""
    if sys.platform != "linux":
        pytest.skip("small disks in memory are made with Linux's tmpfs")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={nbytes}".encode()) != 0:
        pytest.skip(f"only root may mount a small disk: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(bytes(folder), 2)


def fill(disk: Path) -> Path:
    """Use up all room of a disk; return the file that takes it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler
