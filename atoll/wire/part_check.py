"""Verification of a checkpoint on disk against its manifest, without torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import CheckpointCorrupt, WireError
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    decode_manifest,
)

REMEDY = (
    "copy the file from a backup, or choose an older checkpoint: `atoll checkpoint list JOB`, then "
    "`atoll resume JOB --checkpoint ROUND`"
)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that does not match its manifest."""

    round: int
    step: int | None
    """None: its manifest cannot be read."""
    error: CheckpointCorrupt
    """Names the file, and its expected and actual size or hash."""

    def describe(self) -> str:
        """Return one sentence."""
        step = "unknown step" if self.step is None else f"step {self.step}"
        facts = self.error
        detail = f"given {facts.given}" + (f", expected {facts.expected}" if facts.expected else "")
        return f"the checkpoint of round {self.round} ({step}) is damaged: {facts.what}: {detail}"


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that can be resumed."""

    round: int = -1
    """-1: there is none."""
    step: int = 0
    damaged: tuple[Damaged, ...] = ()
    """The newer ones that were passed over, newest first."""

    def describe_damage(self) -> str:
        """Return what is damaged and how many steps are lost by it; empty if nothing is."""
        if not self.damaged:
            return ""
        steps = [one.step for one in self.damaged if one.step is not None]
        lost = f"; {max(steps) - self.step} steps are lost" if steps else ""
        return "; ".join(one.describe() for one in self.damaged) + lost


def newest_good(folder: Path, rounds: list[int]) -> Newest:
    """Return the newest undamaged checkpoint in a job's folder; every part is read and hashed.

    Args:
        folder: The job's folder.
        rounds: Its checkpoints that have a manifest.
    """
    damaged: list[Damaged] = []
    for round_ in sorted(rounds, reverse=True):
        place, manifest = folder / checkpoint_folder(round_), None
        try:
            manifest = read_manifest(place, round_=round_)
            for entry in manifest.parts:
                check_part(place / entry.name, entry, round_=round_)
        except CheckpointCorrupt as error:
            damaged.append(Damaged(round_, manifest.step if manifest else None, error))
            continue
        return Newest(round_, manifest.step, tuple(damaged))
    return Newest(damaged=tuple(damaged))


def read_manifest(folder: Path, *, round_: int) -> Manifest:
    """Return the manifest in a checkpoint's folder.

    Raises:
        CheckpointCorrupt: it cannot be read, or is of another round.
    """
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(
            f"{MANIFEST_NAME} of the checkpoint of round {round_} cannot be read",
            given=str(error),
            remedy=REMEDY,
        ) from error
    return open_manifest(data, round_=round_)


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
            remedy=REMEDY,
        ) from error
    safe = all(entry.name == Path(entry.name).name for entry in manifest.parts)
    if manifest.round != round_ or not safe:
        raise CheckpointCorrupt(
            f"{MANIFEST_NAME} of the checkpoint of round {round_} is of another round",
            given=f"round {manifest.round}, parts {[entry.name for entry in manifest.parts]}",
            expected=f"round {round_}, plain file names",
            remedy=REMEDY,
        )
    return manifest


def check_part(path: Path, entry: ManifestPart, *, round_: int) -> None:
    """Verify a part against its entry in the manifest.

    Raises:
        CheckpointCorrupt: it is missing, of another size, or altered.
    """
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as source:
            sha256 = hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointCorrupt(
            f"part {entry.name} of the checkpoint of round {round_} is missing",
            given=str(error),
            expected=f"{entry.nbytes} bytes",
            remedy=REMEDY,
        ) from error
    if nbytes != entry.nbytes:
        raise CheckpointCorrupt(
            f"part {entry.name} of the checkpoint of round {round_} has the wrong size",
            given=f"{path}: {nbytes} bytes",
            expected=f"{entry.nbytes} bytes",
            remedy=REMEDY,
        )
    if sha256 != entry.sha256:
        raise CheckpointCorrupt(
            f"part {entry.name} of the checkpoint of round {round_} was altered",
            given=f"{path}: SHA-256 {sha256[:16]}...",
            expected=f"{entry.sha256[:16]}... as its manifest says",
            remedy=REMEDY,
        )
