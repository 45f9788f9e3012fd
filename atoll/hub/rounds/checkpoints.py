"""Publishes checkpoints: the manifest is written last, after every part of a round arrived."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from atoll import __version__
from atoll.clock import Clock
from atoll.config.redaction import copy_options
from atoll.errors import CheckpointCorrupt, CheckpointMissing
from atoll.hub.db.database import Database
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.observability.events import Events
from atoll.hub.observability.held_out import held_out_at
from atoll.hub.rounds.announced import StageDue, check_announced
from atoll.hub.rounds.service import RoundService
from atoll.hub.rounds.stage_parts import StageParts
from atoll.hub.storage.checkpoint_folders import (
    abandon,
    newest_complete,
    prune,
    published,
    set_aside,
)
from atoll.hub.storage.files import Files
from atoll.hub.storage.replication import Access, Replicator
from atoll.ids import slot_of
from atoll.wire.manifest import (
    ABOUT_NAME,
    DAMAGED,
    MANIFEST_NAME,
    PIECES_FORMAT,
    SHARED_PART,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    decode_manifest,
    encode_manifest,
    member_part,
)
from atoll.wire.messages import CheckpointPart
from atoll.wire.part_check import REMEDY, Newest, newest_good
from atoll.wire.part_header import read_score, read_stamp
from atoll.wire.retention import Keep

Row = tuple[str, int, ManifestPart]
"""Sender, step, and part."""

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


class Checkpoints:
    """Handles CheckpointPart messages."""

    def __init__(
        self, *, database: Database, jobs: Jobs, files: Files, events: Events,
        rounds: RoundService, clock: Clock,
    ) -> None:  # fmt: skip
        self._database, self._jobs, self._files = database, jobs, files
        self._events, self._rounds, self._clock = events, rounds, clock
        # Publishing awaits between reading the parts and writing the manifest: a second part must
        # not publish too, and `begin` must not delete the folder meanwhile.
        self._lock = asyncio.Lock()
        self._mixed: set[tuple[str, int]] = set()
        """Rounds for which an event about parts of two attempts was raised."""
        self._copies = Replicator(events=events, folder=jobs.folder, access=self._access)
        self.stages = StageParts(jobs, files)
        self.stage_due: StageDue = _always
        self.stages_saved: Callable[[str, int], Awaitable[None]] = _ignore
        """Called when a checkpoint of a model in stages is complete; may be repeated."""

    async def restart(self) -> None:
        """Resume the copies that were unfinished when the hub stopped."""
        for job in self._jobs.list():
            self._copy(job.job)

    async def close(self) -> None:
        """Stop copying; unfinished copies resume at the next start."""
        await self._copies.close()

    async def forget(self, job: str) -> None:
        """Stop all work on the checkpoints of a deleted job."""
        self._mixed = {one for one in self._mixed if one[0] != job}
        await self._copies.forget(job)

    async def choose(self, job: str, *, round_: int | None = None) -> Newest:
        """Return the checkpoint to resume from: the newest that is not damaged.

        Every part is read and hashed.

        Args:
            job: Which job.
            round_: Only this one; -1: none, the job begins again.

        Raises:
            CheckpointMissing: there is no checkpoint of that round.
            CheckpointCorrupt: that checkpoint, or every one of the job, is damaged.
        """
        folder = self._jobs.folder(job)
        if round_ == -1:
            return Newest()
        rounds = await asyncio.to_thread(published, folder)
        if round_ is not None and round_ not in rounds:
            raise CheckpointMissing(
                f"there is no complete checkpoint of round {round_}",
                given=job,
                expected=f"one of rounds {rounds}" if rounds else "no round has one yet",
            )
        found = await self.newest(job, rounds if round_ is None else [round_])
        if found.damaged and found.round < 0:
            raise CheckpointCorrupt(
                found.describe_damage(),
                remedy=f"{REMEDY}; `--checkpoint start` begins again at step 0",
            )
        return found

    async def newest(self, job: str, rounds: list[int] | None = None) -> Newest:
        """Return the newest undamaged checkpoint of a job, or of the given rounds."""
        folder = self._jobs.folder(job)
        return await asyncio.to_thread(
            lambda: newest_good(folder, published(folder) if rounds is None else rounds)
        )

    async def go_back(self, job: str, *, needed: Callable[[], bool] = lambda: True) -> Newest:
        """Forget what is newer than the newest undamaged checkpoint, and return that.

        Args:
            job: Which job.
            needed: Called before anything is deleted; if it returns False, nothing is.
        """
        while True:
            newest = await self.newest(job)
            if await self._begin(job, newest, last=True, needed=needed):
                return newest

    async def begin(self, job: str, *, resume: Newest) -> None:
        """Forget parts and checkpoints after the round from which the job resumes.

        Damaged checkpoints are renamed instead of deleted.

        Raises:
            CheckpointMissing: a newer one has replaced that checkpoint meanwhile; none is deleted.
        """
        if not await self._begin(job, resume, last=False):
            raise CheckpointMissing(
                f"the checkpoint of round {resume.round} was deleted, for a newer one is complete",
                given=job,
                remedy="try again",
            )

    async def _begin(
        self, job: str, resume: Newest, *, last: bool, needed: Callable[[], bool] = lambda: True
    ) -> bool:
        """Forget what comes after a checkpoint; False: it is gone, or not the `last` one."""
        folder, resume_round = self._jobs.folder(job), resume.round
        passed_over = {one.round for one in resume.damaged}

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM checkpoint_parts WHERE job = ? AND round > ?", (job, resume_round)
            )

        async with self._lock:
            # Choosing a checkpoint takes long; one published since may be the only one left.
            rounds = set(await asyncio.to_thread(published, folder)) - passed_over
            gone = resume_round >= 0 and resume_round not in rounds
            if gone or (last and max(rounds, default=-1) > resume_round):
                return False
            if not needed():
                return True
            await self._database.write(write)
            for one in resume.damaged:
                await asyncio.to_thread(set_aside, folder, one.round)
            abandoned = await asyncio.to_thread(abandon, folder, after=resume_round)
        if resume.damaged:
            text = (
                f"{resume.describe_damage()}; it continues from round {resume_round} and keeps the "
                f"damaged files in checkpoints/*{DAMAGED}"
            )
            await self._events.add(job, "checkpoint-damaged", text)
        if abandoned:
            text = (
                f"checkpoints of rounds {abandoned} are abandoned: it continues from {resume_round}"
            )
            await self._events.add(job, "checkpoints-abandoned", text)
        return True

    async def deliver(self, job: str, member: str, part: CheckpointPart) -> bool:
        """Record an uploaded part; return whether the checkpoint is complete now.

        Raises CheckpointCorrupt if it is missing, not as described, or not this member's to save.
        """
        name, stages = part.name, self.stages.names(job)
        rounds = [one.machine.committed_round for one in self._rounds.runtimes.of(job)]
        newest, due = max(rounds, default=None), self.stage_due
        await check_announced(job, member, part, stages=stages, newest=newest, stage_due=due)
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
        published = await self._publish(job, part.round)
        if published and stages:
            await self.stages_saved(job, part.round)
        return published

    async def score(self, job: str, round_: int, loss: float) -> None:
        """Add the held-out loss to the manifest of a model in stages, if it was measured later."""
        name = f"{checkpoint_folder(round_)}/{MANIFEST_NAME}"
        async with self._lock:
            if not self.stages.names(job) or await self._files.stat(job, name) is None:
                return
            path = self._jobs.folder(job) / name
            try:
                manifest = decode_manifest(await asyncio.to_thread(path.read_bytes))
            except FileNotFoundError:
                return  # it was deleted with its job
            if manifest.score is None:
                scored = msgspec.structs.replace(manifest, score=loss)
                await self._files.write(job, name, encode_manifest(scored))

    async def _score_all(self, job: str) -> None:
        """Add held-out losses that were measured later to manifests of a model in stages."""
        if self.stages.names(job):
            for round_ in await asyncio.to_thread(published, self._jobs.folder(job)):
                loss = await held_out_at(self._database, job, round_)
                if loss is not None:
                    await self.score(job, round_, loss)

    async def member_gone(self, job: str) -> None:
        """Publish checkpoints that waited only for a member that is no longer expected."""

        def find(connection: sqlite3.Connection) -> list[tuple[int]]:
            return connection.execute(
                "SELECT DISTINCT round FROM checkpoint_parts WHERE job = ?", (job,)
            ).fetchall()

        for (round_,) in await self._database.read(find):
            await self._publish(job, round_)

    async def _publish(self, job: str, round_: int) -> bool:
        """Write the manifest if no part is missing; return whether it exists."""
        async with self._lock:
            manifest_path = f"{checkpoint_folder(round_)}/{MANIFEST_NAME}"
            if await self._files.stat(job, manifest_path) is not None:
                return True
            rows = await self._parts(job, round_)
            make = self._of_stages if self.stages.names(job) else self._of_members
            manifest = await make(job, round_, rows)
            if manifest is None:
                return False
            await self._files.write(job, manifest_path, encode_manifest(manifest))
        self._rounds.saved(job)
        await self._events.add(job, "checkpoint", f"checkpoint of round {round_} is complete")
        await self._prune(job)
        self._copy(job)
        return True

    async def _of_members(self, job: str, round_: int, rows: list[Row]) -> Manifest | None:
        """Return the manifest of all members' parts; None: some are missing."""
        parts = await self._of_one_state(job, round_, rows)
        delivered = {member for member, _, part in parts if part.name == member_part(member)}
        senders = {member for member, _, _ in parts}
        if not parts or (senders | await self._awaited(job, round_)) - delivered:
            return None
        return Manifest(
            job=job,
            round=round_,
            step=max(step for _, step, _ in parts),
            members=sorted(delivered, key=slot_of),
            parts=[part for _, _, part in parts],
            created=self._clock.wall(),
            versions={"atoll": __version__},
            score=await asyncio.to_thread(read_score, self._part(job, round_, SHARED_PART)),
        )

    async def _of_stages(self, job: str, round_: int, rows: list[Row]) -> Manifest | None:
        """Return the manifest of the files of all stages; None: some are missing."""
        entries = await self.stages.complete(job, round_, [part for _, _, part in rows])
        if not entries:
            return None
        return Manifest(
            job=job,
            round=round_,
            step=round_,
            members=[entry.member for entry in entries if entry.name != ABOUT_NAME],
            parts=entries,
            created=self._clock.wall(),
            versions={"atoll": __version__, "format": PIECES_FORMAT},
            score=await held_out_at(self._database, job, round_),
        )

    async def _of_one_state(self, job: str, round_: int, rows: list[Row]) -> list[Row]:
        """Return the parts with the shared part's stamp; others are of an abandoned attempt."""
        names = [part.name for _, _, part in rows]
        if SHARED_PART not in names:
            return []

        def read() -> dict[str, str]:
            return {name: read_stamp(self._part(job, round_, name)) for name in names}

        stamps = await asyncio.to_thread(read)
        strange = [row for row in rows if stamps[row[2].name] != stamps[SHARED_PART]]
        if strange and (job, round_) not in self._mixed:
            self._mixed.add((job, round_))
            given = ", ".join(f"{row[2].name}: {stamps[row[2].name]!r}" for row in strange)
            text = (
                f"parts of round {round_} have another state than {SHARED_PART} and are ignored: "
                f"{given}, not {stamps[SHARED_PART]!r}"
            )
            await self._events.add(job, "checkpoint-part-refused", text, member=strange[0][0])
        return [row for row in rows if row not in strange]

    def _part(self, job: str, round_: int, name: str) -> Path:
        return self._jobs.folder(job) / checkpoint_folder(round_) / name

    def _copy(self, job: str) -> None:
        url = self._jobs.get(job).spec.checkpoint.to
        if url:
            self._copies.wake(job, url)

    async def _access(self, job: str) -> Access:
        secrets = await self._jobs.secrets_of_copies(job)
        options = copy_options(self._jobs.get(job).spec.checkpoint, secrets)
        return Access(options, secrets)

    async def _awaited(self, job: str, round_: int) -> set[str]:
        record = self._jobs.get(job)
        live = {m.member for m in record.members.values() if m.live}
        return live & set(await self._rounds.store.members_of(job, round_) or live)

    async def _parts(self, job: str, round_: int) -> list[Row]:
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
        await self._score_all(job)
        table = self._jobs.get(job).spec.checkpoint
        keep = Keep(newest=table.keep, every=table.keep_every, best=table.keep_best)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM checkpoint_parts WHERE job = ? AND round < ?", (job, newest)
            )

        async with self._lock:  # so that no older checkpoint is completed while it is deleted
            deleted = await asyncio.to_thread(prune, self._jobs.folder(job), keep=keep)
            newest = await asyncio.to_thread(newest_complete, self._jobs.folder(job))
            await self._database.write(write)
        if deleted:
            logger.info("%s: checkpoints of rounds %s deleted", job, deleted)


async def _always(job: str, member: str, round_: int, stage: int) -> bool:
    return True


async def _ignore(job: str, round_: int) -> None:
    """Do nothing."""
