"""Locks between processes of a machine: the system frees them however their holder ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.1


class FileLock:
    """A lock on a file of no content; for many at once (shared) or for one alone.

    Where the system knows no shared locks (Windows) those are always free: there, files that are
    in use cannot be deleted anyway.
    """

    def __init__(self, path: Path) -> None:
        """Lock nothing yet."""
        self._path = path
        self._handle = -1

    def try_lock(self, *, shared: bool) -> bool:
        """Return whether the lock could be had at once."""
        self.release()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(handle, shared=shared)
        except OSError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    async def lock(self, *, shared: bool, on_wait: Callable[[], None] | None = None) -> None:
        """Wait for the lock; `on_wait` is called once if it cannot be had at once."""
        while not self.try_lock(shared=shared):
            if on_wait is not None:
                on_wait()
                on_wait = None
            await asyncio.sleep(_POLL_S)

    def release(self) -> None:
        """Let go; without a lock it does nothing."""
        if self._handle >= 0:
            os.close(self._handle)  # which ends the lock
            self._handle = -1


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int, *, shared: bool) -> None:
        if not shared:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: int, *, shared: bool) -> None:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
