"""Unpacks an untrusted pack: anyone who may submit jobs can send one.

Everything except plain files inside the folder is refused, as are packs above the size limit. Only
names, sizes and the executable bit are used.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from atoll.code import names
from atoll.errors import StorageFull, WireError

_BLOCK_BYTES = 2**18
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


def unpack(source: Path, target: Path) -> int:
    """Unpack atomically into a new folder; return the number of files.

    Raises:
        WireError: the pack is damaged, or has contents that no pack may have.
        StorageFull: no space is left.
        FileExistsError: the folder exists.
    """
    if target.exists():
        raise FileExistsError(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        with _translated_errors(target), source.open("rb") as packed:
            work.mkdir()
            allowed = names.bytes_allowed(os.fstat(packed.fileno()).st_size)
            with gzip.GzipFile(fileobj=packed, mode="rb") as archive:
                count = _Unpacking(archive, work, allowed).run()
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return count


class _Unpacking:
    def __init__(self, archive: gzip.GzipFile, folder: Path, allowed: int) -> None:
        self._archive = archive
        self._folder = folder
        self._names = names.Names()
        self._allowed = allowed
        self._left = allowed
        self._count = 0

    def run(self) -> int:
        """Unpack every file."""
        while (header := self._header()) is not None:
            name = self._checked(header)
            path = self._folder.joinpath(*name.split("/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = 0o755 if header.mode & 0o100 else 0o644
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(path, flags, mode), "wb") as file:
                for block in self._content(header.size):
                    file.write(block)
            path.chmod(mode)
            self._count += 1
        return self._count

    def _header(self) -> tarfile.TarInfo | None:
        block = self._read(tarfile.BLOCKSIZE)
        if block == bytes(tarfile.BLOCKSIZE):
            if self._read(tarfile.BLOCKSIZE) != block or self._archive.read(1):
                raise _bad("there is data after its end")
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeError) as error:
            raise _bad(f"a header is damaged ({error})") from error
        return header

    def _checked(self, header: tarfile.TarInfo) -> str:
        if self._count == names.MAX_FILES:
            raise _bad(f"it has more than {names.MAX_FILES} files")
        if header.type not in _PLAIN:
            raise _bad(f"{header.name!r} is not a file but a {_kind(header)}")
        if reason := names.name_problem(header.name) or self._names.clash(header.name):
            raise _bad(f"{header.name!r}: {reason}")
        if not 0 <= header.size <= self._left:
            raise _bad(f"it unpacks into more than {self._allowed} bytes")
        self._left -= header.size
        return header.name

    def _content(self, nbytes: int) -> Iterator[bytes]:
        left = nbytes
        while left:
            block = self._read(min(left, _BLOCK_BYTES))
            left -= len(block)
            yield block
        self._read(-nbytes % tarfile.BLOCKSIZE)

    def _read(self, nbytes: int) -> bytes:
        block = self._archive.read(nbytes)
        if len(block) < nbytes:
            raise _bad("it ends too early")
        return block


def _kind(header: tarfile.TarInfo) -> str:
    kinds = {
        tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "link", tarfile.CHRTYPE: "device",
        tarfile.BLKTYPE: "device", tarfile.FIFOTYPE: "pipe", tarfile.DIRTYPE: "folder",
    }  # fmt: skip
    return kinds.get(header.type, f"member of type {header.type!r}")


def _bad(reason: str) -> WireError:
    return WireError(
        "a pack of code is refused",
        given=reason,
        expected="plain files, as `atoll run` packs them",
        remedy="submit the job again with `atoll run`",
    )


@contextlib.contextmanager
def _translated_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _bad(f"it is damaged ({error})") from error
    except OSError as error:
        raise StorageFull(
            "the code of a job cannot be unpacked",
            given=f"{target} ({error})",
            remedy="look at the disk of this machine",
        ) from error
