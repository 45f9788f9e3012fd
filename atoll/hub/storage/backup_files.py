"""The file list of a backup, and durable copies of files."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.errors import AtollError, ConfigError, StorageFull
from atoll.system import flush_folder

LIST = "backup.json"
FORM = 1
"""Format version of the list; newer ones are not read."""

_BLOCK_BYTES = 2**20


class Entry(msgspec.Struct, frozen=True):
    """One file of a backup."""

    name: str
    """Path in the backup, with slashes."""
    nbytes: int
    sha256: str
    modified_ns: int


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `backup.json`."""

    form: int = FORM
    id: str
    taken: float
    """Unix time at which the database was copied."""
    version: str
    address: str
    """host:port that the nodes dial; a hub restored from the backup must be reachable there."""
    files: list[Entry]


def read_listing(backup: Path) -> Listing | None:
    """Return the file list of a backup, or None if the folder is not a complete backup."""
    try:
        listing = msgspec.json.decode((backup / LIST).read_bytes(), type=Listing)
    except (OSError, msgspec.MsgspecError):
        return None
    return listing if listing.form <= FORM else None


def newest(folder: Path) -> Path | None:
    """Return the newest complete backup in a folder, or None."""
    found = [path for path in folder.glob("[!.]*") if (path / LIST).is_file()]
    dated = [(listing.taken, path) for path in found if (listing := read_listing(path))]
    return max(dated)[1] if dated else None


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: Path, target: Path, *, whole_lines: bool) -> tuple[int, str]:
    """Copy a file that may grow, optionally whole lines only, to a new one; return size, hash."""
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
    left, rest = os.fstat(descriptor).st_size, b""
    while left > 0 and (block := os.read(descriptor, min(left, _BLOCK_BYTES))):
        left -= len(block)
        if whole_lines:
            complete, newline, rest = (rest + block).rpartition(b"\n")
            block = complete + newline
        yield block


def link(source: Path, target: Path) -> bool:
    """Hard-link a file into another backup; return False if the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk."""
    path.write_bytes(content)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folders(root: Path) -> None:
    """Flush the directory entries in and below a folder to disk, on systems that need it."""
    for folder in [*(path for path in root.rglob("*") if path.is_dir()), root, root.parent]:
        flush_folder(folder)


def failed_at(path: Path, error: OSError) -> AtollError:
    """Return the Atoll error for an error of the file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(
            "no room is left on the disk", given=str(path), remedy="free some space, try again"
        )
    return ConfigError(
        "a folder cannot be used",
        given=f"{error.filename or path} ({error.strerror or error})",
        expected="a folder that you may write to",
    )
