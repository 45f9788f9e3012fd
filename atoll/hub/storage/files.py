"""Files of jobs: streamed to `.incoming/`, flushed, checked by SHA-256, then renamed atomically.

The hash of a received file is remembered, so that a reader can verify its copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from atoll.errors import ConfigError, HubError
from atoll.hub.db.database import Database
from atoll.hub.quotas.disk import DiskMeter
from atoll.hub.storage import upload
from atoll.ids import new_token
from atoll.system import flush_folder

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    job TEXT NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL, nbytes INTEGER NOT NULL,
    modified_ns INTEGER NOT NULL,
    PRIMARY KEY (job, name)
) WITHOUT ROWID;
"""

MAX_FILE_BYTES = 64 * 2**30

ARTIFACTS = "artifacts/"
"""Folder of the files that processes left, as `artifacts/MEMBER/PATH`."""

MAX_LISTED = 10_000
_MAX_DEPTH = 8

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class FileInfo(msgspec.Struct, frozen=True):
    """A file of a job."""

    name: str
    """Path in the job's folder, with slashes."""
    nbytes: int
    sha256: str
    """Empty if not requested or the file still grows."""
    modified: float
    """Unix time."""


FileList = list[FileInfo]


def plain(name: str) -> str:
    """Return a file's name for comparisons: some file systems ignore case, and dots at its end."""
    return "/".join(part.rstrip(".") for part in name.casefold().split("/"))


def is_log(name: str) -> bool:
    """Return whether a file is one to which the hub appends lines."""
    name = plain(name)
    return name.endswith(".jsonl") and not name.startswith(ARTIFACTS)


class Files:
    """The files of all jobs, under one folder."""

    def __init__(
        self, database: Database, *, jobs_dir: Path, disk: DiskMeter | None = None
    ) -> None:
        """Keep files below `jobs_dir`; `disk` counts and limits their bytes."""
        self._database = database
        self._disk = disk
        self._jobs_dir = jobs_dir
        self._gone: set[str] = set()
        """Deleted jobs; uploads of their files may still be in progress."""
        self._incoming = jobs_dir / ".incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        for leftover in self._incoming.iterdir():
            leftover.unlink()

    def path(self, job: str, name: str) -> Path:
        """Return the path of a job's file; raises ConfigError if it leaves the folder."""
        parts = name.split("/")
        folder = self._jobs_dir / job
        path = folder.joinpath(*parts)
        if (
            not all(_PART.fullmatch(part) for part in (job, *parts))
            or len(parts) > _MAX_DEPTH
            or not path.resolve().is_relative_to(folder.resolve())
        ):
            raise ConfigError(
                "this path cannot be a file of a job",
                given=repr(name[:200]),
                expected="names of letters, digits, dot, dash and underscore, joined by /",
            )
        return path

    async def put(
        self, job: str, name: str, chunks: AsyncIterator[bytes], *, sha256: str = "",
        announced: int = 0, limited: bool = True,
    ) -> FileInfo:  # fmt: skip
        """Store the bytes atomically; an empty `sha256` is not checked.

        `announced` is the size that the sender declared, or 0. Files that the hub itself makes from
        accepted ones are not `limited`.

        Raises:
            LimitReached: the job has too many bytes; an existing file of that name is intact.
            StorageFull: no space is left; likewise.
            WireError: the hash differs, or the file is too large.
        """
        path = self.path(job, name)
        if self._disk is None:
            return await self._put(job, name, path, chunks, sha256)
        replaces = await asyncio.to_thread(_size_of, path)
        if not limited:
            info = await self._put(job, name, path, chunks, sha256)
            self._disk.came(job, info.nbytes - replaces)
            return info
        async with self._disk.arriving(job, replaces=replaces, announced=announced) as arrival:
            info = await self._put(job, name, path, arrival.counted(chunks), sha256)
            arrival.stored()
        return info

    async def _put(
        self, job: str, name: str, path: Path, chunks: AsyncIterator[bytes], sha256: str
    ) -> FileInfo:
        temporary = self._incoming / new_token()
        try:
            with upload.storage_full_as_error(path):
                hexdigest, _ = await upload.receive(
                    temporary, chunks, sha256=sha256, max_bytes=MAX_FILE_BYTES
                )
                self._check_there(job, name)
                status = await asyncio.to_thread(upload.put_in_place, temporary, path)
            if job in self._gone:  # delete only this one: the others may be kept
                await asyncio.to_thread(_take_back, path, self._jobs_dir)
            self._check_there(job, name)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        row = (job, name, hexdigest, status.st_size, status.st_mtime_ns)

        def remember(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", row)

        await self._database.write(remember)
        return FileInfo(name, status.st_size, hexdigest, status.st_mtime)

    def _check_there(self, job: str, name: str) -> None:
        if job in self._gone:
            raise HubError("the job was deleted meanwhile", given=f"{name} of {job}")

    async def write(self, job: str, name: str, data: bytes) -> FileInfo:
        """Store bytes that the hub itself made."""

        async def once() -> AsyncIterator[bytes]:
            yield data

        return await self.put(job, name, once(), limited=False)

    async def stat(self, job: str, name: str) -> FileInfo | None:
        """Return a file's description with its hash, or None if it does not exist."""
        path = self.path(job, name)
        try:
            status = await asyncio.to_thread(path.stat)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not path.is_file():
            return None
        if is_log(name):  # still grows
            return FileInfo(name, status.st_size, "", status.st_mtime)
        row = await self._database.read(
            lambda connection: connection.execute(
                "SELECT sha256 FROM files WHERE job = ? AND name = ? AND nbytes = ?"
                " AND modified_ns = ?",
                (job, name, status.st_size, status.st_mtime_ns),
            ).fetchone()
        )
        sha256 = row[0] if row else await asyncio.to_thread(_hash, path)
        return FileInfo(name, status.st_size, sha256, status.st_mtime)

    async def list(self, job: str) -> FileList:
        """Return the files of a job by name, without hashes."""
        folder = self.path(job, "job.toml").parent
        return await asyncio.to_thread(lambda: list(_walk(folder)))

    def expect_none(self, job: str) -> None:
        """Refuse further files of a job that is being deleted."""
        self._gone.add(job)

    async def size(self, job: str) -> FolderSize:
        """Return the size of a job's folder."""
        return await asyncio.to_thread(_measure, self.path(job, "job.toml").parent)

    async def remove(self, job: str) -> None:
        """Delete a job's folder, if it exists; raises HubError if something cannot be deleted."""
        folder = self.path(job, "job.toml").parent
        if self._disk is not None:
            self._disk.forget(job)
        try:
            await asyncio.to_thread(_remove_folder, folder)
        except OSError as error:
            raise HubError(
                "files of a deleted job cannot be removed yet",
                given=str(error),
                remedy=f"check which program uses {folder}, and its permissions; the hub retries",
            ) from error


def _size_of(path: Path) -> int:
    """Return the size of a file; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class FolderSize(msgspec.Struct, frozen=True):
    """Size of the folder of a job."""

    files: int = 0
    nbytes: int = 0
    checkpoint_bytes: int = 0


def _measure(folder: Path) -> FolderSize:
    files = nbytes = of_checkpoints = 0
    for at, _, names in os.walk(folder):
        below = Path(at).relative_to(folder).parts[:1] == ("checkpoints",)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size = (Path(at) / name).lstat().st_size
                files, nbytes = files + 1, nbytes + size
                of_checkpoints += size if below else 0
    return FolderSize(files, nbytes, of_checkpoints)


def _take_back(path: Path, root: Path) -> None:
    """Delete a file, and the folders below `root` that are empty without it."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        while (path := path.parent) != root:
            path.rmdir()


def _remove_folder(folder: Path) -> None:
    """Delete a folder durably; retries, because files may be added meanwhile."""
    if folder.is_symlink():
        folder.unlink()
    for last in (False, False, True):
        try:
            shutil.rmtree(folder)
            break
        except FileNotFoundError:
            if not folder.exists():
                break
        except OSError:
            if last:
                raise
    flush_folder(folder.parent)


def _walk(folder: Path) -> Iterator[FileInfo]:
    found = 0
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                yield FileInfo(name, status.st_size, "", status.st_mtime)
                found += 1
        if found == MAX_LISTED:
            return


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
