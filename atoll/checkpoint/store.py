"""Where checkpoints are kept: the seam, and the store in a folder.

    <folder>/checkpoints/round-000012/shared.safetensors    model, outer state
                                      w0.safetensors        inner optimizer, random states, ...
                                      manifest.json         written last

A checkpoint exists when its manifest does. A round's number counts the rounds committed when the
state was captured.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from platform import python_version
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from atoll import __version__
from atoll.checkpoint.files import (
    Moment,
    flush_folder,
    hash_file,
    storage_errors,
    unobserved,
    write_file,
)
from atoll.checkpoint.part import SHARED, STATE, Part, member_part, part_blocks, read_part
from atoll.errors import CheckpointCorrupt, CheckpointMissing, StorageFull, WireError
from atoll.ids import slot_of
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    decode_manifest,
    encode_manifest,
)

logger = logging.getLogger(__name__)


class Store(Protocol):
    """Keeps checkpoints of one job."""

    def put(
        self, round_: int, parts: Sequence[Part], *, step: int, member: str, members: Sequence[str]
    ) -> bool:
        """Keep the parts of one member; return whether the checkpoint is complete now.

        MUST NOT damage an older checkpoint, whatever happens meanwhile.

        Args:
            round_: Rounds committed when the state was captured.
            parts: The member's own part, and the shared one if it is the one that writes it.
            step: Optimizer steps done.
            member: Who writes.
            members: Everybody whose parts make it complete.

        Raises:
            StorageFull: there is no room.
        """
        ...

    def get(self, round_: int, *, names: Collection[str]) -> dict[str, Part]:
        """Return parts by name, checked against the manifest; names it does not list are absent.

        Raises:
            CheckpointMissing: there is no complete checkpoint of that round.
            CheckpointCorrupt: a part is missing, truncated or altered; it is named.
        """
        ...

    def manifest(self, round_: int) -> Manifest:
        """Return what a complete checkpoint consists of; raises as `get` does."""
        ...

    def latest(self) -> int:
        """Return the round of the newest complete checkpoint, or -1."""
        ...


class DirectoryStore:
    """A store in a folder of this machine, or of a file system that the members share.

    Several members may put their parts into one folder: whoever finds all of them there writes
    the manifest.

    Args:
        folder: The job's folder, `runs/<job>`.
        job: Name for the manifest; the folder's by default.
        keep: How many complete checkpoints are kept.
        wall: Seconds since 1970, for the manifest.
        moment: Told every point of a write; for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job: str = "",
        keep: int = 2,
        wall: Callable[[], float] = time.time,
        moment: Moment = unobserved,
    ) -> None:
        self.folder = folder
        self._job = job or folder.resolve().name
        self._keep = max(1, keep)
        self._wall = wall
        self._moment = moment

    def put(
        self, round_: int, parts: Sequence[Part], *, step: int, member: str, members: Sequence[str]
    ) -> bool:
        """Keep the parts of one member; return whether the checkpoint is complete now.

        Parts of an earlier attempt at the same round, at another state, do not count.

        Raises:
            StorageFull: there is no room; older checkpoints are untouched.
        """
        folder = self.folder / checkpoint_folder(round_)
        stamp = _stamp(parts, round_=round_, step=step)
        with storage_errors(folder):
            if (folder / MANIFEST_NAME).exists():
                if all(_stamp_of(folder / part.name) == stamp for part in parts):
                    shutil.rmtree(_aside(folder), ignore_errors=True)
                    return True  # resumed from this very checkpoint and stopped again at once
                self._set_aside(folder)
            folder.mkdir(parents=True, exist_ok=True)
            flush_folder(folder.parent)
        self._write(folder, parts, stamp=stamp)
        if not self._publish(folder, stamp=stamp, round_=round_, step=step, members=members):
            return False
        shutil.rmtree(_aside(folder), ignore_errors=True)
        self._prune(round_)
        return True

    def get(self, round_: int, *, names: Collection[str]) -> dict[str, Part]:
        """Return parts by name, checked against the manifest; names it does not list are absent.

        Raises:
            CheckpointMissing: there is no complete checkpoint of that round.
            CheckpointCorrupt: a part is missing, truncated or altered; it is named.
        """
        folder = self._place(round_)
        found = {}
        for entry in self.manifest(round_).parts:
            if entry.name in names:
                check_part(folder / entry.name, entry, round_=round_)
                found[entry.name] = read_part(folder / entry.name)
        return found

    def manifest(self, round_: int) -> Manifest:
        """Return what a complete checkpoint consists of; raises as `get` does."""
        try:
            return self._read_manifest(round_)
        except FileNotFoundError:
            place = str(self.folder / checkpoint_folder(round_))
            raise missing(round_, place=place, rounds=self._complete()) from None

    def latest(self) -> int:
        """Return the round of the newest complete checkpoint, or -1.

        Complete: the manifest reads and every part is there in full size; hashes are checked by
        `get`.
        """
        return max(self._complete(), default=-1)

    def verify(self, round_: int) -> Manifest:
        """Check the hash of every part and return the manifest; raises as `get` does."""
        manifest = self.manifest(round_)
        for entry in manifest.parts:
            check_part(self._place(round_) / entry.name, entry, round_=round_)
        return manifest

    def _set_aside(self, folder: Path) -> None:
        """Keep a complete checkpoint readable while another of the same round is written."""
        aside = _aside(folder)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        self._moment(f"{folder.name} set aside")

    def _place(self, round_: int) -> Path:
        """Return the folder in which a round's checkpoint is, or would be."""
        folder = self.folder / checkpoint_folder(round_)
        waiting = _aside(folder)
        replaced = not (folder / MANIFEST_NAME).exists() and (waiting / MANIFEST_NAME).exists()
        return waiting if replaced else folder

    def _write(self, folder: Path, parts: Sequence[Part], *, stamp: str) -> None:
        """Write all parts, or none when there is no room for one of them."""
        try:
            for part in parts:
                blocks = part_blocks(part.tensors, {**part.metadata, _STAMP: stamp})
                write_file(folder / part.name, blocks, moment=self._moment)
        except StorageFull:
            for part in parts:
                (folder / part.name).unlink(missing_ok=True)
            raise

    def _publish(
        self, folder: Path, *, stamp: str, round_: int, step: int, members: Sequence[str]
    ) -> bool:
        """Write the manifest if every part of this state is there; return whether it is."""
        owners = {SHARED: min(members, key=slot_of), **{member_part(m): m for m in members}}
        if any(_stamp_of(folder / name) != stamp for name in owners):
            return False
        entries = []
        for name, owner in sorted(owners.items()):
            held = hash_file(folder / name)
            entries.append(
                ManifestPart(name=name, member=owner, sha256=held.sha256, nbytes=held.nbytes)
            )
        manifest = Manifest(
            job=self._job,
            round=round_,
            step=step,
            members=sorted(members, key=slot_of),
            parts=entries,
            created=self._wall(),
            versions={
                "atoll": __version__,
                "torch": str(torch.__version__),
                "python": python_version(),
            },
        )
        write_file(folder / MANIFEST_NAME, [encode_manifest(manifest)], moment=self._moment)
        return True

    def _read_manifest(self, round_: int) -> Manifest:
        data = (self._place(round_) / MANIFEST_NAME).read_bytes()
        return open_manifest(data, round_=round_)

    def _complete(self) -> list[int]:
        """Return the rounds of complete checkpoints, ascending."""
        return [r for r in sorted(_rounds(self.folder)) if self._is_complete(r)]

    def _is_complete(self, round_: int) -> bool:
        folder = self._place(round_)
        try:
            if not (folder / MANIFEST_NAME).exists():
                return False
            parts = self._read_manifest(round_).parts
            return all((folder / entry.name).stat().st_size == entry.nbytes for entry in parts)
        except (CheckpointCorrupt, OSError) as error:
            logger.warning("checkpoint of round %d is passed over: %s", round_, error)
            return False

    def _prune(self, newest: int) -> None:
        """Delete what is older than `newest`, except the last complete ones that are kept."""
        complete = [round_ for round_ in self._complete() if round_ <= newest]
        kept = complete[-self._keep :]
        for round_ in _rounds(self.folder):
            if round_ < newest and round_ not in kept:
                folder = self.folder / checkpoint_folder(round_)
                for each in (folder, _aside(folder)):
                    # The manifest first: a checkpoint half deleted must not look complete.
                    (each / MANIFEST_NAME).unlink(missing_ok=True)
                    self._moment(f"{each.name} withdrawn")
                    shutil.rmtree(each, ignore_errors=True)


def open_manifest(data: bytes, *, round_: int) -> Manifest:
    """Return the manifest of a round.

    Raises:
        CheckpointCorrupt: it is malformed, or of another round.
    """
    try:
        manifest = decode_manifest(data)
    except WireError as error:
        raise CheckpointCorrupt(
            f"{MANIFEST_NAME} of the checkpoint of round {round_} cannot be read",
            given=str(error),
            remedy=_REMEDY,
        ) from error
    safe = all(entry.name == Path(entry.name).name for entry in manifest.parts)
    if manifest.round != round_ or not safe:
        raise CheckpointCorrupt(
            f"{MANIFEST_NAME} of the checkpoint of round {round_} belongs elsewhere",
            given=f"round {manifest.round}, parts {[entry.name for entry in manifest.parts]}",
            expected=f"round {round_}, plain file names",
            remedy=_REMEDY,
        )
    return manifest


def check_part(path: Path, entry: ManifestPart, *, round_: int) -> None:
    """Compare a part with its entry in the manifest.

    Raises:
        CheckpointCorrupt: it is missing, of another size, or altered.
    """
    try:
        held = hash_file(path)
    except OSError as error:
        raise CheckpointCorrupt(
            f"part {entry.name} of the checkpoint of round {round_} is missing",
            given=str(error),
            expected=f"{entry.nbytes} bytes",
            remedy=_REMEDY,
        ) from error
    if held.nbytes != entry.nbytes:
        raise CheckpointCorrupt(
            f"part {entry.name} of the checkpoint of round {round_} has the wrong size",
            given=f"{path}: {held.nbytes} bytes",
            expected=f"{entry.nbytes} bytes",
            remedy=_REMEDY,
        )
    if held.sha256 != entry.sha256:
        raise CheckpointCorrupt(
            f"part {entry.name} of the checkpoint of round {round_} was altered",
            given=f"{path}: SHA-256 {held.sha256[:16]}...",
            expected=f"{entry.sha256[:16]}... as its manifest says",
            remedy=_REMEDY,
        )


def missing(round_: int, *, place: str, rounds: Sequence[int]) -> CheckpointMissing:
    """Return the error for a round that has no complete checkpoint."""
    return CheckpointMissing(
        f"there is no complete checkpoint of round {round_}",
        given=place,
        expected=f"one of rounds {list(rounds)}" if rounds else "no round has one yet",
    )


_STAMP = "stamp"
_REPLACED = "-replaced"
_REMEDY = "resume from an older checkpoint of the job, or copy the part from a backup"


def _stamp(parts: Sequence[Part], *, round_: int, step: int) -> str:
    """Return what all parts of one checkpoint have in common, and no others."""
    states = {part.metadata.get(STATE, "") for part in parts}
    return f"round {round_}, step {step}, state {' '.join(sorted(states))}"


def _stamp_of(path: Path) -> str:
    """Return the stamp of a part on disk, or nothing when there is no readable part."""
    try:
        with safe_open(path, framework="pt", device="cpu") as source:
            return str((source.metadata() or {}).get(_STAMP, ""))
    except (SafetensorError, OSError):
        return ""


def _rounds(folder: Path) -> set[int]:
    """Return the rounds that have a folder, complete or not."""
    found = set()
    for path in (folder / "checkpoints").glob("round-*"):
        digits = path.name.removeprefix("round-").removesuffix(_REPLACED)
        if digits.isdigit() and path.is_dir():
            home = folder / checkpoint_folder(int(digits))
            if path in (home, _aside(home)):
                found.add(int(digits))
    return found


def _aside(folder: Path) -> Path:
    """Return where a checkpoint waits until another of its round is complete."""
    return folder.with_name(folder.name + _REPLACED)
