"""Files that only the owner of the hub may read: secrets and keys."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from atoll.ids import new_suffix


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can look into; one that is there becomes so."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(OSError):  # somebody else's, e.g. the volume of a container
        folder.chmod(0o700)


def write_private(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file in one move, with these permissions from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{new_suffix()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
