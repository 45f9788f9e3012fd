"""Streams of files to and from the hub: read, hashed and written in blocks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from atoll.errors import CheckpointCorrupt, ConfigError, StorageFull

BLOCK_BYTES = 256 * 2**10

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


def measure(source: Path | bytes) -> tuple[str, int]:
    """Return SHA-256 and size of an upload; raises ConfigError if the file does not exist."""
    digest, nbytes = hashlib.sha256(), 0
    for block in blocks(source):
        digest.update(block)
        nbytes += len(block)
    return digest.hexdigest(), nbytes


def blocks(source: Path | bytes) -> Iterator[bytes]:
    """Yield the blocks of a file or of bytes."""
    if isinstance(source, bytes):
        for start in range(0, len(source), BLOCK_BYTES):
            yield source[start : start + BLOCK_BYTES]
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise ConfigError("this file cannot be read", given=f"{source} ({error})") from error
    with file:
        while block := file.read(BLOCK_BYTES):
            yield block


def with_progress(
    source: Iterable[bytes], total_bytes: int, progress: Progress | None
) -> Iterator[bytes]:
    """Yield the blocks and report each after it was consumed."""
    done = 0
    for block in source:
        yield block
        done += len(block)
        if progress is not None:
            progress(done, max(total_bytes, done))


def write_verified(target: Path, source: Iterable[bytes], *, sha256: str) -> str:
    """Write blocks to a file atomically; return its SHA-256.

    Raises:
        CheckpointCorrupt: the hash is not `sha256` (empty: any).
        StorageFull: the disk is full, or the quota of this user is used up.
    """
    digest = hashlib.sha256()
    with _full_disk_named(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                for block in source:
                    digest.update(block)
                    file.write(block)
                check_hash(target.name, digest.hexdigest(), expected=sha256)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
    return digest.hexdigest()


def check_hash(name: str, found: str, *, expected: str) -> None:
    """Raise CheckpointCorrupt if a file's SHA-256 is not the expected one (empty: any)."""
    if expected and found != expected:
        raise CheckpointCorrupt(
            f"{name} arrived damaged",
            given=f"SHA-256 {found}",
            expected=f"SHA-256 {expected}",
            remedy="download it again; if this repeats, the file at the hub is damaged",
        )


@contextlib.contextmanager
def _full_disk_named(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull(
            "the disk is full", given=f"{target} ({error.strerror})",
            remedy="free some disk space and try again",
        ) from error  # fmt: skip
