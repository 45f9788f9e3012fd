"""Atomic, durable file writes.

Order: write a temporary file beside the target, flush it to the disk, rename it over the target,
flush the folder. After a crash at any point the target is either the old file or the complete new
one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import StorageFull
from atoll.system import flush_folder

Buffer = bytes | bytearray | memoryview

BLOCK_BYTES = 2**20
"""Bytes hashed and written at a time."""

TEMPORARY_PREFIX = ".new-"
"""Prefix of temporary files; those of a dead writer are leftovers."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""No space, no quota, file larger than its limit."""

Moment = Callable[[str], None]
"""Called with the name of each point of a write; tests interrupt there."""


def unobserved(moment: str) -> None:
    """Do nothing at a point of a write."""


@dataclass(frozen=True, slots=True)
class Written:
    """Hash and size of a file."""

    sha256: str
    nbytes: int


def write_file(path: Path, blocks: Iterable[Buffer], *, moment: Moment = unobserved) -> Written:
    """Write a file atomically and durably; return its hash and size.

    Raises:
        StorageFull: the disk is full; the old content of `path` is untouched.
    """
    digest = hashlib.sha256()
    nbytes = 0
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY_PREFIX)
        try:
            with os.fdopen(handle, "wb") as out:
                moment(f"{path.name} opened")
                for view in _cut(blocks):
                    digest.update(view)
                    nbytes += out.write(view)
                out.flush()
                moment(f"{path.name} written")
                os.fsync(out.fileno())
            moment(f"{path.name} flushed")
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        moment(f"{path.name} renamed")
        flush_folder(path.parent)
        moment(f"{path.name} durable")
    return Written(digest.hexdigest(), nbytes)


def hash_file(path: Path) -> Written:
    """Return hash and size of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    nbytes = 0
    with path.open("rb") as source:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            nbytes += len(block)
    return Written(digest.hexdigest(), nbytes)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" into an error with the place and a remedy.

    Raises:
        StorageFull: the disk filled up inside the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFull(
            "the disk is full, so a checkpoint was not written",
            given=f"{path}: {error.strerror}",
            remedy="free some disk space, or keep fewer with keep in [checkpoint]",
        ) from error


def _cut(blocks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield pieces small enough to stay in the cache between hashing and writing."""
    for block in blocks:
        view = memoryview(block)
        for start in range(0, len(view), BLOCK_BYTES):
            yield view[start : start + BLOCK_BYTES]
