"""Restores a hub from a backup and reconciles its records with what members did since.

Members may know rounds and attempts that the restored database does not. Therefore attempt numbers
(epochs) continue far above any that the lost hub can have used, and every open attempt counts as
aborted. Members at later rounds report this when they join, and the record follows them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import sqlite3
from pathlib import Path

import msgspec

from atoll.clock import Clock
from atoll.errors import CheckpointCorrupt, ConfigError, HubError
from atoll.hub.quotas.limits import FILE as QUOTAS
from atoll.hub.security.certificates import FOLDER as CERTIFICATES
from atoll.hub.security.certificates import write_secret
from atoll.hub.storage.backup import DATABASE, SECRETS
from atoll.hub.storage.backup_files import (
    LIST,
    Listing,
    failed_at,
    hash_of,
    newest,
    read_listing,
    sync_file,
    sync_folders,
    write_synced,
)
from atoll.hub.storage.blobs import FOLDER as BLOBS
from atoll.wire.messages import RoundPlan, Verdict
from atoll.wire.states import JobState

log = logging.getLogger(__name__)

RESTORED = "restored.json"
"""Written to the data folder: the `Origin` of a restored hub."""

EPOCHS_AHEAD = 1_000_000
"""Upper bound of the attempts that a lost hub can have made after its backup."""

REASON = "the hub was restored from a backup"

SCHEMA = """
CREATE TABLE IF NOT EXISTS restored (id TEXT NOT NULL, taken REAL NOT NULL, at REAL NOT NULL);
"""


class Origin(msgspec.Struct, frozen=True):
    """The content of `restored.json`."""

    id: str
    taken: float
    at: float


def find(folder: Path) -> tuple[Path, Listing]:
    """Return the backup at `folder`, or the newest one in it; raises ConfigError."""
    chosen = folder if (folder / LIST).is_file() else newest(folder)
    listing = read_listing(chosen) if chosen else None
    if chosen is None or listing is None:
        raise ConfigError(
            "there is no complete backup here",
            given=str(folder),
            expected="a folder that `atoll hub backup` made",
        )
    return chosen, listing


def restore(folder: Path, *, data: Path, jobs: Path, clock: Clock) -> Listing | None:
    """Create the data and job folders of a hub from a backup, or the newest in `folder`.

    The database appears last, so an interrupted restore can be repeated. Existing job files are
    kept. Returns None without changes if `data` was restored from `folder` before, so that a
    service can always start with the same arguments.

    Raises:
        ConfigError: there is no complete backup.
        CheckpointCorrupt: a file of the backup is damaged; nothing was restored.
        HubError: the data folder belongs to another hub.
        StorageFull: no space is left.
    """
    if (data / DATABASE).exists():
        _check_made_before(folder, data)
        return None
    backup, listing = find(folder)
    _verify(backup, listing)
    try:
        data.mkdir(parents=True, exist_ok=True)
        _put_files(backup, listing, "jobs/", jobs)
        _put_files(backup, listing, f"data/{BLOBS}/", data / BLOBS)
        _put_data(backup, listing, data, jobs=jobs, now=clock.wall())
    except OSError as error:
        raise failed_at(data, error) from error
    log.warning("the hub was restored from %s", backup)
    return listing


def _check_made_before(folder: Path, data: Path) -> None:
    """Raise HubError unless the data was restored from a backup in this folder."""
    try:
        origin = msgspec.json.decode((data / RESTORED).read_bytes(), type=Origin)
    except (OSError, msgspec.MsgspecError):
        origin = None
    ids = {listing.id for p in [folder, *folder.glob("*")] if (listing := read_listing(p))}
    if origin is None or origin.id not in ids:
        raise HubError(
            "this data folder already has the records of a hub",
            given=str(data),
            expected="an empty folder, to start from a backup",
            remedy="start without --from to continue with them, or name another folder with --data",
        )


def _verify(backup: Path, listing: Listing) -> None:
    """Raise CheckpointCorrupt for the first file that is missing or damaged."""
    for entry in listing.files:
        path = backup / entry.name
        if not path.is_file() or path.stat().st_size != entry.nbytes:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
        elif hash_of(path) != entry.sha256:
            found = "other bytes"
        else:
            continue
        raise CheckpointCorrupt(
            "a file of the backup is damaged",
            given=f"{entry.name}: {found}",
            expected=f"{entry.nbytes} bytes with SHA-256 {entry.sha256[:16]}",
            remedy="use an earlier backup",
        )


def _put_files(backup: Path, listing: Listing, start: str, folder: Path) -> None:
    """Copy the files with prefix `start`; manifests after the parts that they name."""
    names = [entry.name for entry in listing.files if entry.name.startswith(start)]
    for name in sorted(names, key=lambda name: (name.endswith("manifest.json"), name)):
        target = folder / name.removeprefix(start)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{secrets.token_hex(4)}.restoring")
        try:
            shutil.copyfile(backup / name, scratch)
            sync_file(scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
    if folder.exists():
        sync_folders(folder)


def _put_data(backup: Path, listing: Listing, data: Path, *, jobs: Path, now: float) -> None:
    scratch = data / f".{DATABASE}.restoring"
    for leftover in data.glob(f"{scratch.name}*"):
        leftover.unlink()
    shutil.copyfile(backup / "data" / DATABASE, scratch)
    _settle(scratch, listing, jobs=jobs, now=now)
    sync_file(scratch)
    for entry in listing.files:
        name = entry.name.removeprefix("data/")
        if name == SECRETS or name.startswith(f"{CERTIFICATES}/"):
            write_secret(data / name, (backup / entry.name).read_bytes())
        elif name == QUOTAS:
            write_synced(data / name, (backup / entry.name).read_bytes())
    origin = Origin(listing.id, listing.taken, now)
    write_synced(data / RESTORED, msgspec.json.encode(origin))
    for stale in data.glob(f"{DATABASE}-*"):
        stale.unlink()  # the write-ahead log of a previous database must not be applied to this one
    scratch.replace(data / DATABASE)
    sync_folders(data)


def _settle(database: Path, listing: Listing, *, jobs: Path, now: float) -> None:
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.executescript(SCHEMA)
        connection.execute("BEGIN")
        connection.execute(
            "INSERT INTO restored VALUES (?, ?, ?)", (listing.id, listing.taken, now)
        )
        ago_s = max(0.0, now - listing.taken)
        _add_event(connection, "", now, f"restored from a backup that is {ago_s:.0f} s old")
        for job, record in connection.execute("SELECT job, record FROM jobs").fetchall():
            fields = msgspec.json.decode(record)
            if fields.get("state") != JobState.RUNNING:
                continue
            _part_histories(connection, job, int(fields.get("committed_round", 0)), now=now)
            text = f"the hub was restored from a backup that is {ago_s:.0f} s old"
            _add_event(connection, job, now, text)
        _forget_missing_parts(connection, jobs)
        connection.execute("COMMIT")


def _part_histories(connection: sqlite3.Connection, job: str, round_: int, *, now: float) -> None:
    """Abort the open attempt of a job and reserve unused numbers for later ones."""
    open_attempts = connection.execute(
        "SELECT epoch, round FROM rounds WHERE job = ? AND verdict IS NULL", (job,)
    ).fetchall()
    for epoch, number in open_attempts:
        verdict = msgspec.msgpack.encode(Verdict(number, epoch, False, reason=REASON))
        connection.execute(
            "UPDATE rounds SET verdict = ?, decided = planned, seconds = 0, nbytes = 0"
            " WHERE job = ? AND epoch = ?",
            (verdict, job, epoch),
        )
    (last,) = connection.execute(
        "SELECT coalesce(max(epoch), 0) FROM rounds WHERE job = ?", (job,)
    ).fetchone()
    epoch = last + EPOCHS_AHEAD
    plan = RoundPlan(job=job, round=round_, epoch=epoch, members=[], route="relay")
    verdict = msgspec.msgpack.encode(Verdict(round_, epoch, False, reason=REASON))
    connection.execute(
        "INSERT INTO rounds (job, epoch, round, plan, planned, verdict, decided, seconds, nbytes)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0)",
        (job, epoch, round_, msgspec.msgpack.encode(plan), now, verdict, now),
    )


def _forget_missing_parts(connection: sqlite3.Connection, jobs: Path) -> None:
    """Forget parts of checkpoints that were being uploaded and are not in the backup."""
    rows = connection.execute("SELECT job, round, name, nbytes FROM checkpoint_parts").fetchall()
    for job, round_, name, nbytes in rows:
        path = jobs / job / "checkpoints" / f"round-{round_:06d}" / name
        if not path.is_file() or path.stat().st_size != nbytes:
            connection.execute(
                "DELETE FROM checkpoint_parts WHERE job = ? AND round = ? AND name = ?",
                (job, round_, name),
            )


def _add_event(connection: sqlite3.Connection, job: str, now: float, text: str) -> None:
    connection.execute(
        "INSERT INTO events (job, time, kind, text, member, fields) VALUES (?, ?, ?, ?, '', '{}')",
        (job, now, "restored", text),
    )
