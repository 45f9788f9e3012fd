"""Online backup of a hub into a folder that appears by one rename when it is complete.

`backup.json` lists its files with hashes. Files unchanged since the previous backup are hard links.

The database MUST be copied first, by SQLite's online backup: a part of a checkpoint is on disk
before the database records it, so every file that the copy names exists. Checkpoints are copied
newest first; one that is deleted meanwhile is skipped, because a newer one exists by then.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sqlite3
import time as calendar
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll import __version__
from atoll.clock import Clock
from atoll.errors import CheckpointCorrupt, ConfigError, HubError, StorageFull, WireError
from atoll.hub.quotas.limits import FILE as QUOTAS
from atoll.hub.security.certificates import FILES
from atoll.hub.security.certificates import FOLDER as CERTIFICATES
from atoll.hub.storage.backup_files import (
    LIST,
    Entry,
    Listing,
    copy,
    failed_at,
    hash_of,
    link,
    newest,
    read_listing,
    sync_file,
    sync_folders,
    write_synced,
)
from atoll.hub.storage.blobs import FOLDER as BLOBS
from atoll.hub.storage.blobs import blobs_held_in
from atoll.hub.storage.files import ARTIFACTS
from atoll.wire.manifest import MANIFEST_NAME, decode_manifest

DATABASE = "hub.sqlite"
SECRETS = "secrets.json"
PLACE = "place.json"
"""Written by the hub to its data folder: a `BackupPlan`."""

_TRIES = 5
"""Retries for a job that deletes old checkpoints while they are copied."""

_STALE_S = 24 * 3600.0
"""Age at which the remains of an interrupted backup are deleted."""

_UNFINISHED = ".taking-"


class BackupPlan(msgspec.Struct, frozen=True):
    """What `atoll hub backup` needs to know about a hub."""

    jobs: str
    address: str
    """host:port in its tickets."""


@dataclass(frozen=True, slots=True)
class BackupResult:
    """Where a backup is and what it contains."""

    path: Path
    listing: Listing
    left_out: list[str] = field(default_factory=list)
    """Incomplete or damaged checkpoints and unreadable files, with reasons."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files, including those shared with another backup."""
        return sum(entry.nbytes for entry in self.listing.files)


def save_last_folder(data: Path, *, jobs: Path, address: str) -> None:
    """Record where the jobs of a hub are and its address."""
    text = msgspec.json.encode(BackupPlan(str(jobs.resolve()), address))
    scratch = data / f"{PLACE}.new"
    scratch.write_bytes(text)
    scratch.replace(data / PLACE)


def load_last_folder(data: Path) -> BackupPlan | None:
    """Return the record of `save_last_folder`, or None."""
    try:
        return msgspec.json.decode((data / PLACE).read_bytes(), type=BackupPlan)
    except (OSError, msgspec.MsgspecError):
        return None


def take(
    target: Path, *, data: Path, clock: Clock, jobs: Path | None = None, keep: int | None = None
) -> BackupResult:
    """Copy a running or stopped hub into a new folder under `target`.

    Args:
        target: Folder of backups; created if missing.
        data: Data folder of the hub.
        clock: Source of the backup's time.
        jobs: Folder of the runs; None: as the hub recorded it.
        keep: Number of newest backups to keep; None: all.

    Raises:
        HubError: there is no hub database, or its copy is damaged.
        ConfigError: the folder of the runs is not known.
        StorageFull: no space is left; earlier backups are intact.
    """
    place = load_last_folder(data)
    jobs = jobs or (Path(place.jobs) if place else None)
    if not (data / DATABASE).is_file():
        raise HubError(
            "there is no hub to back up here",
            given=str(data),
            expected=f"a hub's data folder, with {DATABASE}",
            remedy="name it with --data",
        )
    if jobs is None or not jobs.is_dir():
        raise ConfigError(
            "the folder of the hub's runs is not known",
            given=str(jobs) if jobs else "nothing",
            remedy="name it with --runs",
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        return _take(target, data=data, clock=clock, jobs=jobs, keep=keep, place=place)
    except OSError as error:
        raise failed_at(target, error) from error


def _take(
    target: Path,
    *,
    data: Path,
    clock: Clock,
    jobs: Path,
    keep: int | None,
    place: BackupPlan | None,
) -> BackupResult:
    _sweep(target, clock)
    before = newest(target)
    work = target / f"{_UNFINISHED}{secrets.token_hex(4)}"
    work.mkdir(mode=0o700)
    try:
        copied_at = clock.wall()
        copying = _Copying(work, before)
        copying.database(data / DATABASE)
        copying.file(data / SECRETS, f"data/{SECRETS}", private=True)
        if (data / QUOTAS).is_file():
            copying.file(data / QUOTAS, f"data/{QUOTAS}")
        for path in (data / CERTIFICATES / name for name in FILES):
            if path.is_file():  # without them every node would have to join again
                copying.file(path, f"data/{CERTIFICATES}/{path.name}", private=True)
        for sha256 in _blobs_in(work / "data" / DATABASE):
            copying.blob(data / BLOBS / sha256[:2] / sha256, f"data/{BLOBS}/{sha256[:2]}/{sha256}")
        for job in _jobs_in(work / "data" / DATABASE):
            copying.job(jobs / job, f"jobs/{job}")
        listing = Listing(
            id=secrets.token_hex(8),
            taken=copied_at,
            version=__version__,
            address=place.address if place else "",
            files=copying.entries,
        )
        write_synced(work / LIST, msgspec.json.format(msgspec.json.encode(listing), indent=1))
        sync_folders(work)
        path = _put_in_place(work, target, copied_at)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if keep is not None:
        _prune(target, keep=max(1, keep))
    return BackupResult(path, listing, copying.left_out)


class _Copying:
    def __init__(self, work: Path, before: Path | None) -> None:
        self._work = work
        self._before = before
        listing = read_listing(before) if before else None
        self._known = {entry.name: entry for entry in listing.files} if listing else {}
        self.entries: list[Entry] = []
        self.left_out: list[str] = []

    def database(self, source: Path) -> None:
        """Copy the database as of one instant, and check the copy."""
        name = f"data/{DATABASE}"
        copy = self._work / name
        copy.parent.mkdir(parents=True)
        copy_database(source, copy)
        sync_file(copy)
        self.entries.append(Entry(name, copy.stat().st_size, hash_of(copy), 0))

    def blob(self, source: Path, name: str) -> None:
        """Copy or link a blob; its name is its hash, so equal names mean equal content."""
        known, target = self._known.get(name), self._work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if known and self._before and link(self._before / name, target):
            self.entries.append(known)
            return
        try:
            self.file(source, name)
        except FileNotFoundError:
            self.left_out.append(f"{name}: deleted before it was copied")

    def job(self, folder: Path, name: str) -> None:
        """Copy a job's folder; checkpoints last, newest first."""
        if not folder.is_dir():
            self.left_out.append(f"{name}: its folder is missing")
            return
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder)
            if inner.parts[0] != "checkpoints" and path.is_file() and not path.is_symlink():
                self._try(path, f"{name}/{inner.as_posix()}")
        for _ in range(_TRIES):
            if self._checkpoints(folder / "checkpoints", f"{name}/checkpoints"):
                return
        self.left_out.append(f"{name}: its checkpoints were deleted faster than they were copied")

    def _checkpoints(self, folder: Path, name: str) -> bool:
        """Copy the existing checkpoints; return False if the newest ones were deleted meanwhile."""
        found = sorted((p for p in folder.glob("round-*") if p.is_dir()), reverse=True)
        complete = [path for path in found if (path / MANIFEST_NAME).is_file()]
        copied = False
        for path in found:
            entries = len(self.entries)
            try:
                self._checkpoint(path, f"{name}/{path.name}")
                copied = copied or path in complete
            except (FileNotFoundError, CheckpointCorrupt) as error:
                del self.entries[entries:]
                shutil.rmtree(self._work / name / path.name, ignore_errors=True)
                if isinstance(error, CheckpointCorrupt):
                    self.left_out.append(f"{name}/{path.name}: {error}")
        return copied or not complete

    def _checkpoint(self, folder: Path, name: str) -> None:
        if (self._work / name).exists():
            return
        complete = (folder / MANIFEST_NAME).is_file()
        names = sorted(p.name for p in folder.iterdir() if p.is_file())
        entries = {
            part: self.file(folder / part, f"{name}/{part}")
            for part in [n for n in names if n != MANIFEST_NAME] + [MANIFEST_NAME] * complete
        }
        if not complete:
            return
        try:
            manifest = decode_manifest((self._work / name / MANIFEST_NAME).read_bytes())
        except WireError as error:
            raise CheckpointCorrupt("its manifest cannot be read", given=str(error)) from error
        for wanted in manifest.parts:
            entry = entries.get(wanted.name)
            if entry is None or (entry.nbytes, entry.sha256) != (wanted.nbytes, wanted.sha256):
                raise CheckpointCorrupt("a part does not match the manifest", given=wanted.name)

    def _try(self, source: Path, name: str) -> None:
        """Copy a file that may be deleted meanwhile."""
        try:
            self.file(source, name)
        except FileNotFoundError:
            return
        except PermissionError as error:
            self.left_out.append(f"{name}: {error.strerror}")

    def file(self, source: Path, name: str, *, private: bool = False) -> Entry:
        """Copy one file, or link it to the previous backup; return its entry."""
        target = self._work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        status = source.stat()
        known = self._known.get(name)
        unchanged = known and (known.nbytes, known.modified_ns) == (
            status.st_size,
            status.st_mtime_ns,
        )
        if known and unchanged and self._before and link(self._before / name, target):
            entry = known
        else:
            # The hub appends to its own .jsonl files, so the last line may be incomplete.
            lines = source.suffix == ".jsonl" and f"/{ARTIFACTS}" not in name
            nbytes, digest = copy(source, target, whole_lines=lines)
            entry = Entry(name, nbytes, digest, status.st_mtime_ns)
        if private:
            target.chmod(0o600)
        self.entries.append(entry)
        return entry


def copy_database(source: Path, target: Path) -> None:
    """Copy an SQLite file in use as of one instant, and check it; raises HubError, StorageFull."""
    try:
        with (
            contextlib.closing(
                sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
            ) as reader,
            contextlib.closing(sqlite3.connect(target, isolation_level=None)) as writer,
        ):
            # all pages in one step: a consistent copy that does not block writers
            reader.backup(writer)
            writer.execute("PRAGMA journal_mode=DELETE")
            (verdict,) = writer.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        if "full" in str(error):
            raise StorageFull("no room is left for the backup", given=str(target)) from error
        raise HubError(
            "the hub's database cannot be copied", given=f"{source} ({error})"
        ) from error
    if verdict != "ok":
        raise HubError(
            "the hub's database is damaged",
            given=f"{source}: {verdict}",
            remedy="keep the last good backup; this one was not made",
        )


def _jobs_in(database: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return [job for (job,) in connection.execute("SELECT job FROM jobs ORDER BY job")]


def _blobs_in(database: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return blobs_held_in(connection)


def _put_in_place(work: Path, target: Path, copied_at: float) -> Path:
    """Rename a finished backup to its time, with a suffix if that name is taken."""
    base = calendar.strftime("%Y%m%d-%H%M%S", calendar.localtime(copied_at))
    path, number = target / base, 2
    while path.exists():
        path, number = target / f"{base}-{number}", number + 1
    work.rename(path)
    sync_folders(path)
    return path


def _sweep(target: Path, clock: Clock) -> None:
    for path in target.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if clock.wall() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _prune(target: Path, *, keep: int) -> None:
    found = [(listing.taken, p) for p in target.glob("[!.]*") if (listing := read_listing(p))]
    for _, path in sorted(found)[:-keep]:
        # first, so that a half-deleted backup is not taken for a complete one
        (path / LIST).unlink()
        shutil.rmtree(path, ignore_errors=True)
