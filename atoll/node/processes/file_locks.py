"""Locks between processes of a machine, released by the system when their holder ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from atoll.system import try_lock

_POLL_S = 0.1


class FileLock:
    """A shared or exclusive lock on an empty file.

    Windows has no shared locks: there they always succeed, and files in use cannot be deleted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = -1

    def try_lock(self, *, shared: bool) -> bool:
        """Return whether the lock was acquired at once."""
        self.release()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try_lock(handle, shared=shared)
        except OSError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    async def lock(self, *, shared: bool, on_wait: Callable[[], None] | None = None) -> None:
        """Wait for the lock; `on_wait` is called once if it is not free."""
        while not self.try_lock(shared=shared):
            if on_wait is not None:
                on_wait()
                on_wait = None
            await asyncio.sleep(_POLL_S)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._handle >= 0:
            os.close(self._handle)  # this releases the lock
            self._handle = -1
