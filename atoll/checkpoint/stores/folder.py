"""A job's folder of checkpoint files, each complete or absent; independent of tensors.

    <folder>/checkpoints/round-000012/shared.safetensors    model, outer state
                                      w0.safetensors        inner optimizer, random states, ...
                                      manifest.json         written last

A checkpoint exists when its manifest does. Several members, as threads or processes, may put into
one folder: the one that finds all parts writes the manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint.files import (
    TEMPORARY_PREFIX,
    Buffer,
    Moment,
    Written,
    hash_file,
    storage_errors,
    unobserved,
    write_file,
)
from atoll.errors import CheckpointCorrupt, CheckpointMissing, StorageFull
from atoll.ids import slot_of
from atoll.system import LOCKS_WAIT, flush_folder, lock_waiting
from atoll.wire.manifest import (
    MANIFEST_NAME,
    REPLACED,
    SHARED_PART,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
    member_part,
    round_of,
)
from atoll.wire.part_check import check_part, open_manifest
from atoll.wire.part_header import read_score, read_stamp
from atoll.wire.retention import Keep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartFile:
    """A part to be written into a folder."""

    name: str
    blocks: Callable[[], Iterable[Buffer]]
    """Returns the bytes of the file; its header has the checkpoint's stamp."""


class Folder:
    """The checkpoints in one job's folder.

    Args:
        path: The job's folder, `runs/<job>`.
        job: Name for the manifest; the folder's by default.
        keep: Which complete checkpoints are kept.
        versions: Of Atoll, torch and Python, for the manifest.
        wall: Seconds since 1970, for the manifest.
        moment: Called at every point of a write; for tests.
    """

    def __init__(
        self,
        path: Path,
        *,
        job: str = "",
        keep: Keep | None = None,
        versions: Mapping[str, str] | None = None,
        wall: Callable[[], float] = time.time,
        moment: Moment = unobserved,
    ) -> None:
        self.path = path
        self.job = job or path.resolve().name
        self._keep = keep or Keep()
        self._versions = dict(versions or {})
        self._wall = wall
        self._moment = moment

    # ------------------------------------------------------------------------ writing

    def put(
        self,
        round_: int,
        files: Sequence[PartFile],
        *,
        stamp: str,
        step: int,
        members: Sequence[str],
    ) -> bool:
        """Write the parts of one member; return whether the checkpoint is complete now.

        Parts of an earlier attempt at the same round have another stamp and do not count.

        Args:
            round_: Rounds committed when the state was captured.
            files: The parts.
            stamp: The stamp in the headers of all members' parts.
            step: Step of the schedule.
            members: Members whose parts make it complete.

        Raises:
            StorageFull: the disk is full; older checkpoints are untouched.
        """
        folder = self.path / checkpoint_folder(round_)
        with storage_errors(folder):
            if (folder / MANIFEST_NAME).exists():
                if all(read_stamp(folder / file.name) == stamp for file in files):
                    # The job resumed from this checkpoint and stopped again at once, or was killed
                    # between the manifest and the clean-up.
                    self._tidy(round_)
                    return True
                self._set_aside(folder)
            folder.mkdir(parents=True, exist_ok=True)
            flush_folder(folder.parent)
        written = self._write(folder, files)
        if not self._publish(
            folder, written, stamp=stamp, round_=round_, step=step, members=members
        ):
            return False
        self._tidy(round_)
        return True

    def begin(self, round_: int) -> Path:
        """Make an empty folder for a round's files, which the caller writes.

        A complete checkpoint of that round stays readable until `settle`.
        """
        folder = self.path / checkpoint_folder(round_)
        with storage_errors(folder):
            if (folder / MANIFEST_NAME).exists():
                self._set_aside(folder)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            flush_folder(folder.parent)
        return folder

    def settle(self, round_: int) -> None:
        """Delete what the complete checkpoint of a round replaces, and older ones not kept."""
        self._tidy(round_)

    def abandon(self, *, after: int) -> list[int]:
        """Delete all later rounds: the run resumes from round `after`.

        Returns:
            The rounds that were deleted.
        """
        later = sorted(round_ for round_ in self._rounds() if round_ > after)
        for round_ in later:
            self._delete(round_)
        return later

    def _set_aside(self, folder: Path) -> None:
        """Keep a complete checkpoint readable while another of the same round is written."""
        with _locked(folder.parent):
            if not (folder / MANIFEST_NAME).exists():
                return  # another member has set it aside meanwhile
            aside = _aside(folder)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            self._moment(f"{folder.name} set aside")

    def _write(self, folder: Path, files: Sequence[PartFile]) -> dict[str, Written]:
        """Write all parts, or none when there is no room for one of them."""
        written = {}
        try:
            for file in files:
                path = folder / file.name
                written[file.name] = write_file(path, file.blocks(), moment=self._moment)
        except StorageFull:
            for file in files:
                (folder / file.name).unlink(missing_ok=True)
            raise
        return written

    def _publish(
        self,
        folder: Path,
        written: Mapping[str, Written],
        *,
        stamp: str,
        round_: int,
        step: int,
        members: Sequence[str],
    ) -> bool:
        """Write the manifest if every part of this state is there; return whether it is."""
        owners = {SHARED_PART: min(members, key=slot_of), **{member_part(m): m for m in members}}
        if any(read_stamp(folder / name) != stamp for name in owners):
            return False
        entries = []
        for name, owner in sorted(owners.items()):
            held = written.get(name) or hash_file(folder / name)
            entries.append(
                ManifestPart(name=name, member=owner, sha256=held.sha256, nbytes=held.nbytes)
            )
        manifest = Manifest(
            job=self.job,
            round=round_,
            step=step,
            members=sorted(members, key=slot_of),
            parts=entries,
            created=self._wall(),
            versions=self._versions,
            score=read_score(folder / SHARED_PART),
        )
        write_file(folder / MANIFEST_NAME, [encode_manifest(manifest)], moment=self._moment)
        return True

    def _tidy(self, newest: int) -> None:
        """Delete checkpoints that `newest` replaces and older ones, except those to keep."""
        shutil.rmtree(_aside(self.path / checkpoint_folder(newest)), ignore_errors=True)
        complete = {r: m.score for r, m in self.complete().items() if r <= newest}
        kept = self._keep.rounds(complete)
        for round_ in self._rounds():
            if round_ < newest and round_ not in kept:
                self._delete(round_)
            elif round_ < newest:  # delete leftovers of a killed writer
                for path in (self.path / checkpoint_folder(round_)).glob(f"{TEMPORARY_PREFIX}*"):
                    path.unlink(missing_ok=True)

    def _delete(self, round_: int) -> None:
        folder = self.path / checkpoint_folder(round_)
        for each in (folder, _aside(folder)):
            # The manifest first: a half-deleted checkpoint must not look complete.
            (each / MANIFEST_NAME).unlink(missing_ok=True)
            self._moment(f"{each.name} withdrawn")
            shutil.rmtree(each, ignore_errors=True)

    # ------------------------------------------------------------------------ reading

    def manifest(self, round_: int) -> Manifest:
        """Return the manifest of a complete checkpoint.

        Raises:
            CheckpointMissing: there is no complete checkpoint of that round.
            CheckpointCorrupt: the manifest is damaged, or of another round.
        """
        try:
            return self._read_manifest(round_)
        except FileNotFoundError:
            place = str(self.path / checkpoint_folder(round_))
            raise missing(round_, place=place, rounds=sorted(self.complete())) from None

    def complete(self) -> dict[int, Manifest]:
        """Return the manifests of complete checkpoints by round, ascending.

        Complete: the manifest reads and every part is there in full size; hashes are checked by
        `check`.
        """
        found = {round_: self._if_complete(round_) for round_ in sorted(self._rounds())}
        return {round_: manifest for round_, manifest in found.items() if manifest is not None}

    def check(self, round_: int, *, names: Iterable[str] | None = None) -> dict[str, Path]:
        """Verify a checkpoint's parts against the manifest and return their files.

        Args:
            round_: Which checkpoint.
            names: Only these parts, if the manifest lists them; None: all.

        Raises:
            CheckpointMissing: there is no complete checkpoint of that round.
            CheckpointCorrupt: a part is missing, truncated or altered; it is named.
        """
        folder = self.place(round_)
        wanted = None if names is None else set(names)
        found = {}
        for entry in self.manifest(round_).parts:
            if wanted is None or entry.name in wanted:
                check_part(folder / entry.name, entry, round_=round_)
                found[entry.name] = folder / entry.name
        return found

    def place(self, round_: int) -> Path:
        """Return the folder in which a round's checkpoint is, or would be."""
        folder = self.path / checkpoint_folder(round_)
        waiting = _aside(folder)
        replaced = not (folder / MANIFEST_NAME).exists() and (waiting / MANIFEST_NAME).exists()
        return waiting if replaced else folder

    def _read_manifest(self, round_: int) -> Manifest:
        data = (self.place(round_) / MANIFEST_NAME).read_bytes()
        return open_manifest(data, round_=round_)

    def _if_complete(self, round_: int) -> Manifest | None:
        folder = self.place(round_)
        try:
            if not (folder / MANIFEST_NAME).exists():
                return None
            manifest = self._read_manifest(round_)
            whole = all((folder / p.name).stat().st_size == p.nbytes for p in manifest.parts)
        except (CheckpointCorrupt, OSError) as error:
            logger.warning("checkpoint of round %d is skipped: %s", round_, error)
            return None
        if not whole:
            logger.warning("checkpoint of round %d is skipped: a part has the wrong size", round_)
        return manifest if whole else None

    def _rounds(self) -> set[int]:
        """Return the rounds that have a folder, complete or not."""
        paths = (self.path / "checkpoints").glob("round-*")
        rounds = {round_of(path.name) for path in paths if path.is_dir()}
        return {round_ for round_ in rounds if round_ is not None}


def missing(round_: int, *, place: str, rounds: Sequence[int]) -> CheckpointMissing:
    """Return the error for a round that has no complete checkpoint."""
    return CheckpointMissing(
        f"there is no complete checkpoint of round {round_}",
        given=place,
        expected=f"one of rounds {list(rounds)}" if rounds else "no round has one yet",
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other threads and processes that lock this folder, where the system can."""
    if not LOCKS_WAIT:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            lock_waiting(handle)
        yield
    finally:
        os.close(handle)  # this releases the lock


def _aside(folder: Path) -> Path:
    """Return where a checkpoint is kept until its replacement is complete."""
    return folder.with_name(folder.name + REPLACED)
