"""Bytes that arrive in chunks become a file: hashed, bounded, flushed, named by one rename."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from atoll.errors import AtollError, FrameTooLarge, StorageFull, WireError

_WRITE_BYTES = 1 * 2**20
"""Bytes gathered before a thread writes them: below it, the change of threads costs more."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


async def receive(
    target: Path, chunks: AsyncIterator[bytes], *, sha256: str, max_bytes: int
) -> tuple[str, int]:
    """Write what `chunks` yields to `target`, flushed to the disk; return its hash and its bytes.

    Args:
        target: The file, which is left half written when this raises.
        chunks: The bytes.
        sha256: What they must hash to, in hexadecimal; empty: not checked.
        max_bytes: More are refused.

    Raises:
        WireError: the bytes hash to something else.
        FrameTooLarge: they are too many.
    """
    hasher, total = hashlib.sha256(), 0
    with target.open("wb") as file:
        async for block in _blocks(chunks):
            total += len(block)
            if total > max_bytes:
                raise FrameTooLarge("a file is too large", expected=f"{max_bytes} bytes")
            await asyncio.to_thread(_write_block, file, hasher, block)
        await asyncio.to_thread(_flush, file)
    found = hasher.hexdigest()
    if sha256 and found != sha256.lower():
        raise WireError(
            "a file arrived damaged",
            given=f"SHA-256 {found}, {total} bytes",
            expected=f"SHA-256 {sha256.lower()}",
            remedy="send it again",
        )
    return found, total


def put_in_place(temporary: Path, path: Path) -> os.stat_result:
    """Give a file its name, durably, and return what it is now."""
    fresh = not path.parent.is_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(path)
    sync_folder(path.parent)
    if fresh:
        sync_folder(path.parent.parent)
    return path.stat()


@contextlib.contextmanager
def storage_full_as_error(path: Path) -> Iterator[None]:
    """Turn the operating system's "no room" into an error a person can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFull(
                "no room is left for a file",
                given=str(path),
                remedy="free some space on the hub's disk and send it again; the old file is safe",
            ) from error
        raise AtollError("a file cannot be written", given=f"{path} ({error})") from error


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Gather small chunks into blocks worth a trip to another thread."""
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        if len(gathered) >= _WRITE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    yield bytes(gathered)


def _write_block(file: BinaryIO, hasher: hashlib._Hash, block: bytes) -> None:
    file.write(block)
    hasher.update(block)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be flushed, and need not be
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
