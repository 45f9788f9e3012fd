"""Files in the folder of a program, which may have put links or pipes in their place.

The program may be confined, while the agent that reads and writes these files is not.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_READ_BYTES = 64 * 2**10

_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def replace_text(path: Path, text: str) -> None:
    """Write a new file in place of a file or link of that name; raises OSError."""
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)


def open_to_append(path: Path) -> BinaryIO:
    """Return an unbuffered file, created if necessary; raises OSError if it is none."""
    handle = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(handle, "ab", buffering=0)


def read_bounded(path: Path) -> bytes:
    """Return the first `MAX_READ_BYTES` of a file; raises OSError if it is none."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        return file.read(MAX_READ_BYTES)


def _open(path: Path, flags: int) -> int:
    handle = os.open(path, flags | _NO_LINK_NO_WAIT | _BINARY, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a file")
    return handle
