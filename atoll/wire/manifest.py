"""The manifest of a checkpoint: its parts and their hashes.

It is written last, by an atomic rename, so a checkpoint with a manifest is complete. Readers
verify every part against it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.errors import WireError
from atoll.wire.malformed import MALFORMED

MANIFEST_NAME = "manifest.json"

MANIFEST_VERSION = 1
"""Format version; readers reject a newer one."""

SHARED_PART = "shared.safetensors"
"""The part common to all members: model and outer state. The other parts are useless without it."""

PART_SUFFIX = ".safetensors"

PIECES_FORMAT = "pieces-1"
"""Value of `format` in the `versions` of a checkpoint that consists of pieces of tensors, see
`atoll.checkpoint.sharded`."""

ABOUT_NAME = "about.json"
"""File of such a checkpoint with the texts and numbers of its writer."""

MODEL_PREFIX = "model/"
"""Prefix of the model's tensors in a part of a checkpoint."""

HISTORY = "history"
"""Metadata key in the files of a model in stages: `history` of `SwarmPlace`."""

ABOUT = "about"
"""Metadata key in the first file of a model in stages: the content of `ABOUT_NAME`."""

STAMP = "stamp"
"""Metadata key of the stamp, which is equal for the parts of one checkpoint only."""

SCORE = "score"
"""Metadata key in the shared part: held-out loss of the state, if measured."""

REPLACED = "-replaced"
"""Suffix of the folder that keeps an old checkpoint until its replacement is complete."""

DAMAGED = "-damaged"
"""Suffix of the folder of a damaged checkpoint, kept aside when a job resumes from an older one."""


class ManifestPart(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    name: str
    member: str
    sha256: str
    """Lower-case hexadecimal."""
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a complete checkpoint."""

    job: str
    round: int
    """Rounds committed when the state was captured."""
    step: int
    """Optimizer steps of each member."""
    members: list[str]
    """In slot order."""
    parts: list[ManifestPart]
    created: float
    """Seconds since 1970."""
    versions: dict[str, str] = {}
    """Of Atoll, torch, Python."""
    score: float | None = None
    """Held-out loss of the state, nats per token; None: not measured."""
    version: int = MANIFEST_VERSION


def checkpoint_folder(round_: int) -> str:
    """Return the folder of a round's checkpoint, relative to the job's folder."""
    return f"checkpoints/round-{round_:06d}"


def member_part(member: str) -> str:
    """Return the file name of a member's part."""
    return member + PART_SUFFIX


def piece_file(rank: int) -> str:
    """Return the name of the file that a rank, or the saver of a stage, writes."""
    return f"rank-{rank:05d}{PART_SUFFIX}"


def round_of(folder: str) -> int | None:
    """Return the round in a checkpoint folder's name, or None if it is not such a name."""
    digits = folder.rpartition("/")[2].removeprefix("round-").removesuffix(REPLACED)
    if not digits.isdecimal():
        return None
    home = checkpoint_folder(int(digits)).rpartition("/")[2]
    return int(digits) if folder.rpartition("/")[2] in (home, home + REPLACED) else None


def stamp_of(*, round_: int, step: int, states: Iterable[str]) -> str:
    """Return the stamp of one checkpoint's parts.

    Args:
        round_: Rounds committed.
        step: Position of the learning-rate schedule.
        states: Digests of the model that the parts belong to; duplicates are ignored.
    """
    return f"round {round_}, step {step}, state {' '.join(sorted(set(states)))}"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest; raises WireError if it is malformed or of a newer version."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except MALFORMED as error:
        raise WireError("the manifest of a checkpoint is malformed", given=str(error)) from error
    if manifest.version > MANIFEST_VERSION:
        raise WireError(
            "the manifest of a checkpoint is of a newer version",
            given=f"version {manifest.version}",
            expected=f"version {MANIFEST_VERSION} or older",
            remedy="install the version of Atoll that wrote it",
        )
    return manifest
