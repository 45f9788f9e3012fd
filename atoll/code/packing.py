"""Creates a pack: a gzipped ustar archive that depends only on the files themselves.

Files are sorted by name, with one of two modes, without times and owners. Empty folders are
omitted. A link is stored as its target file, which must be in the same folder.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Self

from atoll.code import names
from atoll.code.ignore import included_files
from atoll.errors import ConfigError, StorageFull
from atoll.system import FILES_HAVE_MODES

_BLOCK_BYTES = 2**18
_REMEDY = "exclude it with a line in .atollignore"


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack on disk; as a context manager it deletes its file."""

    sha256: str
    path: Path
    nbytes: int
    files: int

    def delete(self) -> None:
        """Delete the pack."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.delete()


class _Hashed:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.nbytes = 0

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        self.nbytes += len(block)
        return self._file.write(block)

    def flush(self) -> None:
        self._file.flush()


def pack(folder: Path) -> Pack:
    """Pack a folder into a temporary file; call `delete`, or use `with`.

    Raises:
        ConfigError: the folder is empty, too large, or contains something that cannot be packed.
        StorageFull: no space is left for the pack.
    """
    if not folder.is_dir():
        raise ConfigError("the folder of the code does not exist", given=str(folder))
    found = _collect(folder.resolve())
    handle, name = tempfile.mkstemp(prefix="atoll-code-", suffix=".tar.gz")
    try:
        with os.fdopen(handle, "wb") as file, _storage_errors():
            writer = _Hashed(file)
            total = _write(writer, found)
        if total > names.bytes_allowed(writer.nbytes):
            raise ConfigError(
                "the files of the code are too large, or compress too well",
                given=f"{total} bytes that pack into {writer.nbytes}",
                expected=f"at most {names.bytes_allowed(writer.nbytes)} bytes",
                remedy="leave the largest out with .atollignore: " + _largest(found),
            )
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Pack(writer.digest.hexdigest(), Path(name), writer.nbytes, len(found))


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: Path
    nbytes: int


def _collect(root: Path) -> list[_File]:
    """Return the files to pack, sorted, after checking all of them."""
    known, found, total = names.Names(), [], 0
    for name, entry in included_files(root):
        reason = names.name_problem(name) or known.clash(name)
        if reason:
            raise ConfigError(
                "a file cannot be packed", given=f"{name!r}: {reason}", remedy=_REMEDY
            )
        path = _real(root, name, entry)
        found.append(_File(name, path, _size(name, path)))
        total += found[-1].nbytes
        if len(found) > names.MAX_FILES or total > names.MAX_BYTES:
            raise ConfigError(
                "the folder of the code is too large",
                given=f"{root}: more than {len(found) - 1} files, {total} bytes",
                expected=f"at most {names.MAX_FILES} files and {names.MAX_BYTES} bytes",
                remedy="leave data out with .atollignore; the largest: " + _largest(found),
            )
    if not found:
        raise ConfigError(
            "the folder of the code has no files to pack",
            given=str(root),
            remedy="look at its .atollignore, or the .gitignore files here and above",
        )
    return sorted(found, key=lambda file: file.name)


def _size(name: str, path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:  # it was removed since its folder was listed
        raise ConfigError(
            "a file was changed while it was packed", given=f"{name} ({error})"
        ) from error


def _real(root: Path, name: str, entry: os.DirEntry[str]) -> Path:
    path = Path(entry.path)
    if entry.is_file(follow_symlinks=False):
        return path
    if not entry.is_symlink():
        raise ConfigError(
            "only regular files can be packed",
            given=f"{name!r} is a pipe, a socket or a device",
            remedy=_REMEDY,
        )
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            "a symbolic link is broken", given=f"{name!r} ({error})", remedy=_REMEDY
        ) from error
    if not target.is_relative_to(root) or not target.is_file():
        raise ConfigError(
            "a symbolic link cannot be packed",
            given=f"{name!r} leads to {target}",
            expected="a link to a file in the same folder",
            remedy=_REMEDY + ", or put a copy in its place",
        )
    return target


def _write(writer: _Hashed, found: list[_File]) -> int:
    total = 0
    compressed = gzip.GzipFile("", "wb", 6, writer, mtime=0)
    with compressed:
        for file in found:
            total += _add(compressed, file)
        compressed.write(bytes(2 * tarfile.BLOCKSIZE))
    return total


def _add(archive: gzip.GzipFile, file: _File) -> int:
    try:
        with file.path.open("rb") as source:
            status = os.fstat(source.fileno())
            header = tarfile.TarInfo(file.name)
            header.size = status.st_size
            header.mode = 0o755 if _is_program(source, status.st_mode) else 0o644
            archive.write(header.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
            for block in _exactly(source, status.st_size, file):
                archive.write(block)
    except OSError as error:
        if error.filename is None:  # an error of the pack, not of the file
            raise
        raise ConfigError("a file cannot be read", given=f"{file.path} ({error})") from error
    archive.write(bytes(-status.st_size % tarfile.BLOCKSIZE))
    return status.st_size


def _is_program(source: BinaryIO, mode: int) -> bool:
    """Return whether a file is executable; on Windows, whether it begins with `#!`."""
    if FILES_HAVE_MODES:
        return bool(mode & 0o100)
    script = source.read(2) == b"#!"
    source.seek(0)
    return script


def _exactly(source: IO[bytes], nbytes: int, file: _File) -> Iterator[bytes]:
    left = nbytes
    while left:
        try:
            block = source.read(min(left, _BLOCK_BYTES))
        except OSError as error:
            raise ConfigError("a file cannot be read", given=f"{file.path} ({error})") from error
        if not block:
            raise ConfigError("a file was changed while it was packed", given=file.name)
        left -= len(block)
        yield block


def _largest(found: list[_File]) -> str:
    first = sorted(found, key=lambda file: -file.nbytes)[:3]
    return ", ".join(f"{file.name} ({file.nbytes / 1e6:.1f} MB)" for file in first)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFull(
            "the pack of the code cannot be written",
            given=f"{tempfile.gettempdir()} ({error})",
            remedy="free some disk space there",
        ) from error
