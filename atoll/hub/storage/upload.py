"""Streams uploads into files: hashed, bounded, flushed, then renamed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from atoll.errors import AtollError, FrameTooLarge, StorageFull, WireError
from atoll.system import flush_folder

_WRITE_BYTES = 1 * 2**20
"""Bytes collected before a thread writes them; for less, switching threads costs more."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


async def receive(
    target: Path, chunks: AsyncIterator[bytes], *, sha256: str, max_bytes: int
) -> tuple[str, int]:
    """Write the bytes to `target`, flushed to disk; return their hash and number.

    `target` is left incomplete on errors. An empty `sha256` is not checked.

    Raises:
        WireError: the bytes have another hash.
        FrameTooLarge: they are more than `max_bytes`.
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
    """Rename a file durably and return its status."""
    made = list(itertools.takewhile(lambda folder: not folder.is_dir(), path.parents))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(path)
    flush_folder(path.parent)
    for folder in made:
        flush_folder(folder.parent)
    return path.stat()


@contextlib.contextmanager
def storage_full_as_error(path: Path) -> Iterator[None]:
    """Translate "no space" errors of the operating system into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFull(
                "no room is left on the hub's disk for a file",
                given=str(path),
                remedy="free some space there; what was stored before is untouched",
            ) from error
        raise AtollError("a file cannot be written", given=f"{path} ({error})") from error


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Merge small chunks into blocks of at least `_WRITE_BYTES`."""
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
