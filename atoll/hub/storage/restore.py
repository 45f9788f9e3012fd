"""Makes a hub's folders from a backup, and tells the records that time has passed since.

The hub that was lost went on for a while after its backup was taken. Its members have seen rounds,
attempts and launches that the restored record does not know. Two things keep the two histories
apart: attempts (epochs) go on far above any number that the lost hub can have used, and every
attempt that was open in the backup counts as aborted. Members that stand on later rounds tell so
when they join, and the record follows them.
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
"""In the data folder: which backup it was made from."""

EPOCHS_AHEAD = 1_000_000
"""Attempts of rounds that a lost hub can have made after its backup, at the very most."""

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
    """Return the backup that a folder is, or the newest one in it.

    Raises:
        ConfigError: there is no complete backup.
    """
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
    """Make the data folder and the job folders of a hub from a backup.

    The database appears last, by one rename: what was interrupted can simply be begun again. Files
    of jobs that are there already stay. Asked again with the same backup it does nothing, so that
    a service may always be started with the same words.

    Args:
        folder: A backup, or a folder of backups, of which the newest is taken.
        data: Data folder of the hub to be; must not have a database yet.
        jobs: Folder of its runs.
        clock: Whence the time comes.

    Returns:
        The list of the backup, or None when this data was made from a backup in `folder` before.

    Raises:
        ConfigError: there is no complete backup.
        CheckpointCorrupt: a file of the backup is damaged; nothing was put in place.
        HubError: the data folder is in use by another hub's data.
        StorageFull: no room is left.
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
    """Accept data that was made from a backup in this folder; refuse any other."""
    try:
        origin = msgspec.json.decode((data / RESTORED).read_bytes(), type=Origin)
    except (OSError, msgspec.MsgspecError):
        origin = None
    ids = {listing.id for p in [folder, *folder.glob("*")] if (listing := read_listing(p))}
    if origin is None or origin.id not in ids:
        raise HubError(
            "this data folder has the records of a hub already",
            given=str(data),
            expected="an empty folder, to start from a backup",
            remedy="start without --from to go on with them, or name another folder with --data",
        )


def _verify(backup: Path, listing: Listing) -> None:
    """Check every file of a backup against its list.

    Raises:
        CheckpointCorrupt: names the first one that is missing or damaged.
    """
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
    """Copy what begins with `start` to a folder; a manifest comes after the parts that it names."""
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
    """Put secrets and database in place, the database last."""
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
    origin = Origin(listing.id, listing.taken, now)
    write_synced(data / RESTORED, msgspec.json.encode(origin))
    for stale in data.glob(f"{DATABASE}-*"):
        stale.unlink()  # the log of a database that is gone must not be played into this one
    scratch.replace(data / DATABASE)
    sync_folders(data)


def _settle(database: Path, listing: Listing, *, jobs: Path, now: float) -> None:
    """Tell the records of a copied database that time has passed since it was taken."""
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
    """Abort the open attempt of a job, and let later ones have numbers that were never used."""
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
    """Forget parts of checkpoints that were under way and are not in the backup."""
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
