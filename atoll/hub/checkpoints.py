"""Publishes checkpoints: the manifest is written last, when every part of a round has arrived."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from atoll import __version__
from atoll.clock import Clock
from atoll.config import parse_spec
from atoll.errors import CheckpointCorrupt, WireError
from atoll.hub.database import Database
from atoll.hub.events import Events
from atoll.hub.files import Files
from atoll.hub.jobs import Jobs
from atoll.hub.rounds import LIVE_STATES, Rounds
from atoll.ids import slot_of
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    decode_manifest,
    encode_manifest,
)
from atoll.wire.messages import CheckpointPart

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS checkpoint_parts (
    job TEXT NOT NULL,
    round INTEGER NOT NULL,
    name TEXT NOT NULL,
    member TEXT NOT NULL,
    step INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    PRIMARY KEY (job, round, name)
) WITHOUT ROWID
"""

SHARED_PART = "shared.safetensors"
"""The part without which no other is of use."""


def own_part(member: str) -> str:
    """Return the name of the part that every member writes for itself."""
    return f"{member}.safetensors"


def newest_complete(folder: Path) -> int:
    """Return the highest round of a complete checkpoint in a job's folder, or -1.

    Complete: the manifest can be read and every part it names is there in its full size.
    """
    for round_ in sorted(_published(folder), reverse=True):
        if _is_complete(folder / checkpoint_folder(round_)):
            return round_
    return -1


def prune(folder: Path, *, keep: int) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints; return the rounds deleted.

    Folders without a manifest that are older than the newest complete one go too; the newest
    complete checkpoint always stays.
    """
    newest = newest_complete(folder)
    complete = [r for r in sorted(_published(folder)) if r <= newest]
    kept = set(complete[-max(1, keep) :]) | {newest}
    deleted = []
    for path in sorted((folder / "checkpoints").glob("round-*")):
        round_ = _round_of(path)
        if round_ is None or round_ >= newest or round_ in kept:
            continue
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        deleted.append(round_)
    return deleted


class Checkpoints:
    """Answers CheckpointPart."""

    def __init__(
        self,
        *,
        database: Database,
        jobs: Jobs,
        files: Files,
        events: Events,
        rounds: Rounds,
        clock: Clock,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._files = files
        self._events = events
        self._rounds = rounds
        self._clock = clock
        self._lock = asyncio.Lock()

    async def begin(self, job: str, *, resume_round: int) -> None:
        """Forget parts that an earlier attempt of a job delivered after its last checkpoint."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM checkpoint_parts WHERE job = ? AND round > ?", (job, resume_round)
            )

        await self._database.write(write)

    async def deliver(self, job: str, member: str, part: CheckpointPart) -> bool:
        """Record a part that lies in the job's folder; return whether all are there now.

        Raises:
            CheckpointCorrupt: the file is not there, or is not the one described.
        """
        name = part.name.rpartition("/")[2]
        path = f"{checkpoint_folder(part.round)}/{name}"
        found = await self._files.stat(job, path)
        if found is None or (found.nbytes, found.sha256) != (part.nbytes, part.sha256):
            raise CheckpointCorrupt(
                "a part of a checkpoint is not what was announced",
                given=f"{path}: {found.nbytes if found else 'no'} bytes",
                expected=f"{part.nbytes} bytes with SHA-256 {part.sha256[:16]}",
                remedy="send the part again",
            )
        row = (job, part.round, name, member, part.step, part.sha256, part.nbytes)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO checkpoint_parts VALUES (?, ?, ?, ?, ?, ?, ?)", row
            )

        await self._database.write(write)
        return await self._publish(job, part.round)

    async def member_gone(self, job: str) -> None:
        """Publish what waited only for a member that is not expected any more."""

        def find(connection: sqlite3.Connection) -> list[tuple[int]]:
            return connection.execute(
                "SELECT DISTINCT round FROM checkpoint_parts WHERE job = ?", (job,)
            ).fetchall()

        for (round_,) in await self._database.read(find):
            await self._publish(job, round_)

    async def newest(self, job: str) -> int:
        """Return the round of the newest complete checkpoint of a job, or -1."""
        return await asyncio.to_thread(newest_complete, self._jobs.folder(job))

    async def _publish(self, job: str, round_: int) -> bool:
        """Write the manifest if nothing is missing; return whether it is there."""
        async with self._lock:
            manifest_path = f"{checkpoint_folder(round_)}/{MANIFEST_NAME}"
            if await self._files.stat(job, manifest_path) is not None:
                return True
            parts = await self._parts(job, round_)
            delivered = {member for member, _, part in parts if part.name == own_part(member)}
            senders = {member for member, _, _ in parts}
            if not any(part.name == SHARED_PART for _, _, part in parts):
                return False
            if (senders | await self._awaited(job, round_)) - delivered:
                return False
            manifest = Manifest(
                job=job,
                round=round_,
                step=max(step for _, step, _ in parts),
                members=sorted(delivered, key=slot_of),
                parts=[part for _, _, part in parts],
                created=self._clock.wall(),
                versions={"atoll": __version__},
            )
            await self._files.write(job, manifest_path, encode_manifest(manifest))
        await self._events.add(job, "checkpoint", f"checkpoint of round {round_} is complete")
        await self._prune(job)
        return True

    async def _awaited(self, job: str, round_: int) -> set[str]:
        """Return the members of that committed round that still live."""
        record = self._jobs.get(job)
        live = {m.member for m in record.members.values() if m.state in LIVE_STATES}
        return live & set(await self._rounds.book.members_of(job, round_) or live)

    async def _parts(self, job: str, round_: int) -> list[tuple[str, int, ManifestPart]]:
        def find(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            return connection.execute(
                "SELECT member, step, name, sha256, nbytes FROM checkpoint_parts"
                " WHERE job = ? AND round = ? ORDER BY name",
                (job, round_),
            ).fetchall()

        return [
            (member, step, ManifestPart(name=name, member=member, sha256=sha256, nbytes=nbytes))
            for member, step, name, sha256, nbytes in await self._database.read(find)
        ]

    async def _prune(self, job: str) -> None:
        keep = parse_spec(self._jobs.get(job).spec).checkpoint.keep
        deleted = await asyncio.to_thread(prune, self._jobs.folder(job), keep=keep)
        newest = await self.newest(job)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM checkpoint_parts WHERE job = ? AND round < ?", (job, newest)
            )

        await self._database.write(write)
        if deleted:
            logger.info("%s: checkpoints of rounds %s deleted", job, deleted)


def _round_of(path: Path) -> int | None:
    """Return the round that a folder's name tells."""
    digits = path.name.removeprefix("round-")
    return int(digits) if digits.isdigit() and path.is_dir() else None


def _published(folder: Path) -> list[int]:
    """Return the rounds whose manifest exists."""
    rounds = map(_round_of, (folder / "checkpoints").glob("round-*"))
    return [r for r in rounds if r is not None and _manifest(folder, r).is_file()]


def _manifest(folder: Path, round_: int) -> Path:
    return folder / checkpoint_folder(round_) / MANIFEST_NAME


def _is_complete(folder: Path) -> bool:
    """Return whether the manifest reads and its parts are there."""
    try:
        manifest = decode_manifest((folder / MANIFEST_NAME).read_bytes())
        return all((folder / p.name).stat().st_size == p.nbytes for p in manifest.parts)
    except (OSError, WireError):
        return False
