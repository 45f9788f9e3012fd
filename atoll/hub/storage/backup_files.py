"""What backups are made of: the list of their files, and copies that are really on the disk."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.errors import AtollError, ConfigError, StorageFull

LIST = "backup.json"
FORM = 1
"""Form of the list; a newer one is not read."""

_BLOCK_BYTES = 2**20


class Entry(msgspec.Struct, frozen=True):
    """One file of a backup."""

    name: str
    """Path in the backup, with slashes."""
    nbytes: int
    sha256: str
    modified_ns: int
    """Of the file it was copied from."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `backup.json`."""

    form: int = FORM
    id: str
    taken: float
    """Seconds since 1970 at which the database was copied."""
    version: str
    address: str
    """host:port that the nodes dial; a hub started from the backup has to be there."""
    files: list[Entry]


def read_listing(backup: Path) -> Listing | None:
    """Return the list of a backup's files, or None when the folder is no complete backup."""
    try:
        listing = msgspec.json.decode((backup / LIST).read_bytes(), type=Listing)
    except (OSError, msgspec.MsgspecError):
        return None
    return listing if listing.form <= FORM else None


def newest(folder: Path) -> Path | None:
    """Return the newest complete backup in a folder of backups, or None."""
    found = [path for path in folder.glob("[!.]*") if (path / LIST).is_file()]
    dated = [(listing.taken, path) for path in found if (listing := read_listing(path))]
    return max(dated)[1] if dated else None


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: Path, target: Path, *, whole_lines: bool) -> tuple[int, str]:
    """Copy a file to the disk; return its bytes and hash.

    Args:
        source: A file, which may grow meanwhile.
        target: Must not exist.
        whole_lines: Leave out a last line that is not complete.
    """
    digest, total = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("xb") as writer:
        for block in _blocks(reader.fileno(), whole_lines=whole_lines):
            writer.write(block)
            digest.update(block)
            total += len(block)
        writer.flush()
        os.fsync(writer.fileno())
    return total, digest.hexdigest()


def _blocks(descriptor: int, *, whole_lines: bool) -> Iterator[bytes]:
    """Yield the bytes that a file has now; of one that grows, only lines that are complete."""
    left, rest = os.fstat(descriptor).st_size, b""
    while left > 0 and (block := os.read(descriptor, min(left, _BLOCK_BYTES))):
        left -= len(block)
        if whole_lines:
            complete, newline, rest = (rest + block).rpartition(b"\n")
            block = complete + newline
        yield block


def link(source: Path, target: Path) -> bool:
    """Share a file between two backups; False where the disk cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on the disk when this returns."""
    path.write_bytes(content)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folders(root: Path) -> None:
    """Wait until the names in a folder and below it are on the disk, where that can be asked."""
    if os.name != "posix":
        return
    for folder in [*(path for path in root.rglob("*") if path.is_dir()), root, root.parent]:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def failed_at(path: Path, error: OSError) -> AtollError:
    """Return what an error of the file system means for the person who asked."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(
            "no room is left on the disk", given=str(path), remedy="free some space, try again"
        )
    return ConfigError(
        "a folder cannot be used",
        given=f"{error.filename or path} ({error.strerror or error})",
        expected="a folder that you may write to",
    )
