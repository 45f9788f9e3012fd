"""Parts as the bytes of their files in a file on the disk, written one tensor after the other.

Where a part's tensors lie spread over the ranks of an island, putting them all together in memory
would take what no rank has. So each goes into the file as soon as it is here, and is let go.
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
    """A file that is reused; one thread at a time.

    Args:
        folder: Where it is; files that a killed process left there go at the next start, see
            `remove_leftovers`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def write(self, parts: Sequence[Part]) -> list[Region]:
        """Write parts one behind the other, each from the start of a page; return where they are.

        Raises:
            StorageFull: there is no room on the disk.
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
                    del block  # the tensor goes before the next one comes
                nbytes = lay_out(part.tensors, part.metadata).nbytes
                regions.append(Region(part.name, nbytes, offset, -1, str(self._path)))
                offset += -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return regions

    def close(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
