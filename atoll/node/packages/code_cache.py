"""Cache of code archives: each fetched once, verified, the least recently used deleted first."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from atoll.code import unpack
from atoll.errors import CheckpointCorrupt, ConfigError, HubError, HubUnreachable, WireError
from atoll.net.http.client import HubClient
from atoll.net.retry import backoff
from atoll.node.processes.file_locks import FileLock
from atoll.node.processes.threads import StillWanted, in_thread

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 4 * 2**30

AWAY_S = 60.0
"""How long the hub may be unreachable while an archive is fetched."""

_STALE_S = 24 * 3600.0
"""Age at which files left by a crash are deleted."""


class CodeCache:
    """Archives in one folder, which several agents of this machine may share."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = folder / "lock"

    async def unpack(
        self, sha256: str, target: Path, *, client: Callable[[], HubClient]
    ) -> tuple[int, bool]:
        """Replace a folder by a fresh copy of some code, fetched with a client if necessary.

        Returns the number of files, and whether it was fetched.

        Raises:
            ConfigError: the archive must not be unpacked.
            HubError: the hub does not have it, or is unreachable.
            StorageFull: the disk is full.
        """
        lock = FileLock(self._lock)
        await lock.lock(shared=True)  # `_trim` needs it exclusively, so nothing is deleted
        try:
            count, fetched = await in_thread(
                lambda wanted: self._unpack(sha256, target, client, wanted)
            )
        finally:
            lock.release()
        if fetched:
            await in_thread(lambda wanted: self._trim(keep=sha256))
        return count, fetched

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.tar.gz"

    def _unpack(
        self, sha256: str, target: Path, client: Callable[[], HubClient], wanted: StillWanted
    ) -> tuple[int, bool]:
        path = self._path(sha256)
        fetched = not _is_whole(path, sha256)
        if fetched:
            with client() as hub:
                _fetch(hub, sha256, path, wanted)
        with contextlib.suppress(OSError):
            path.touch()
        wanted.check()
        return _unpack(path, target), fetched

    def _trim(self, *, keep: str) -> None:
        """Delete the least recently used archives, unless an agent is unpacking."""
        lock = FileLock(self._lock)
        if not lock.try_lock(shared=False):
            return
        try:
            found = [(path.stat(), path) for path in self._folder.glob("*.tar.gz")]
            for left in self._folder.glob(".*"):  # of an agent killed during a download
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()
            total = sum(status.st_size for status, _ in found)
            for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
                if total <= self._max_bytes:
                    return
                if path != self._path(keep):
                    path.unlink()
                    total -= status.st_size
                    log.info("code %s was not used for longest: deleted", path.name[:12])
        except OSError as error:
            log.warning("old packs of code cannot be deleted: %s", error)
        finally:
            lock.release()


def _unpack(path: Path, target: Path) -> int:
    if target.exists():
        shutil.rmtree(target)
    try:
        return unpack(path, target)
    except WireError as error:  # its hash is right, so it was submitted like this
        raise ConfigError(
            error.what, given=error.given, expected=error.expected, remedy=error.remedy
        ) from error


def _is_whole(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return True
    except OSError:
        return False
    log.warning("%s is damaged: downloading it again", path)
    return False


def _fetch(hub: HubClient, sha256: str, path: Path, wanted: StillWanted) -> None:
    """Fetch an archive; retries while the hub is unreachable."""
    deadline = time.monotonic() + AWAY_S
    for wait_s in backoff():
        try:
            hub.get_blob(sha256, path, progress=wanted.check)
            return
        except HubUnreachable:
            if time.monotonic() > deadline:
                raise
        except CheckpointCorrupt as error:
            raise HubError(
                "the code of the job arrived damaged",
                given=error.given,
                expected=error.expected,
                remedy="if this repeats, it is damaged at the hub: restore the hub from a backup",
            ) from error
        wanted.wait(wait_s)
