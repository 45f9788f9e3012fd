"""The manifest of a checkpoint: which parts it has and what their bytes must hash to.

A checkpoint is complete when its manifest is there, because the manifest is written last and by an
atomic rename. Whoever reads a checkpoint checks every part against it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.errors import WireError

MANIFEST_NAME = "manifest.json"
"""File name of a manifest, inside the folder of its checkpoint."""

MANIFEST_VERSION = 1
"""Version of the form below; a reader refuses a newer one."""

SHARED_PART = "shared.safetensors"
"""The part that is the same for everybody: model and outer state. No other is of use without it."""

PART_SUFFIX = ".safetensors"

STAMP = "stamp"
"""Key in a part's metadata: what the parts of one checkpoint have in common, and no others."""

SCORE = "score"
"""Key in the shared part's metadata: held-out loss of the state, where it was measured."""

REPLACED = "-replaced"
"""End of the folder in which a checkpoint waits until another of its round is complete."""


class ManifestPart(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    name: str
    """File name inside the checkpoint's folder."""
    member: str
    """Who wrote it."""
    sha256: str
    """Lower-case hexadecimal."""
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole checkpoint."""

    job: str
    round: int
    """Rounds committed when the state was captured."""
    step: int
    """Optimizer steps of each member by then."""
    members: list[str]
    """In slot order."""
    parts: list[ManifestPart]
    created: float
    """Seconds since 1970."""
    versions: dict[str, str] = {}
    """Of Atoll, torch, Python."""
    score: float | None = None
    """Held-out loss of the state, in nats per token; None: not measured."""
    version: int = MANIFEST_VERSION


def checkpoint_folder(round_: int) -> str:
    """Return the folder of a round's checkpoint, relative to the job's folder."""
    return f"checkpoints/round-{round_:06d}"


def member_part(member: str) -> str:
    """Return the name of the part that a member writes."""
    return member + PART_SUFFIX


def round_of(folder: str) -> int | None:
    """Return the round that the name of a checkpoint's folder tells, or None."""
    digits = folder.rpartition("/")[2].removeprefix("round-").removesuffix(REPLACED)
    if not digits.isdigit():
        return None
    home = checkpoint_folder(int(digits)).rpartition("/")[2]
    return int(digits) if folder.rpartition("/")[2] in (home, home + REPLACED) else None


def stamp_of(*, round_: int, step: int, states: Iterable[str]) -> str:
    """Return the stamp of the parts of one checkpoint.

    Args:
        round_: Rounds committed.
        step: Where the schedule stood.
        states: Digests of the model that the parts belong to; equal ones count once.
    """
    return f"round {round_}, step {step}, state {' '.join(sorted(set(states)))}"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON, for people too."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in JSON bytes.

    Raises:
        WireError: it is not a manifest, or one of a newer version.
    """
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError("the manifest of a checkpoint is malformed", given=str(error)) from error
    if manifest.version > MANIFEST_VERSION:
        raise WireError(
            "the manifest of a checkpoint is of a newer version",
            given=f"version {manifest.version}",
            expected=f"version {MANIFEST_VERSION} or older",
            remedy="install the version of Atoll that wrote it",
        )
    return manifest
