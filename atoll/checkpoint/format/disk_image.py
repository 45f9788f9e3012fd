"""Write parts into a file on disk, one tensor after the other.

Used for parts whose tensors are sharded over the ranks of an island, because no rank has memory for
all of them. Each tensor is written as soon as it arrives, and released.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from atoll.checkpoint.files import storage_errors
from atoll.checkpoint.format.layout import lay_out
from atoll.checkpoint.format.part import Part, part_blocks
from atoll.checkpoint.shared_memory import PAGE_BYTES, PREFIX, Region


class DiskImage:
    """A reusable file; for one thread at a time.

    Args:
        folder: Its folder; files of a killed process are deleted at the next start, see
            `remove_leftovers`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def write(self, parts: Sequence[Part]) -> list[Region]:
        """Write parts one after the other, each from the start of a page; return their regions.

        Raises:
            StorageFull: the disk is full.
            CheckpointError: a tensor's type cannot be saved.
        """
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self._folder, prefix=PREFIX)
            os.close(handle)
            self._path = Path(path)
        regions, offset = [], 0
        with storage_errors(self._path), self._path.open("r+b") as out:
            for part in parts:
                out.seek(offset)
                for block in part_blocks(part.tensors, part.metadata):
                    out.write(block)
                    del block  # free the tensor before the next one arrives
                nbytes = lay_out(part.tensors, part.metadata).nbytes
                regions.append(Region(part.name, nbytes, offset, -1, str(self._path)))
                offset += -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return regions

    def close(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
