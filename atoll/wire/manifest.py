"""The manifest of a checkpoint: which parts it has and what their bytes must hash to.

A checkpoint is complete when its manifest is there, because the manifest is written last and by an
atomic rename. Whoever reads a checkpoint checks every part against it.
"""

from __future__ import annotations

import msgspec

from atoll.errors import WireError

MANIFEST_NAME = "manifest.json"
"""File name of a manifest, inside the folder of its checkpoint."""

MANIFEST_VERSION = 1
"""Version of the form below; a reader refuses a newer one."""


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
    version: int = MANIFEST_VERSION


def checkpoint_folder(round_: int) -> str:
    """Return the folder of a round's checkpoint, relative to the job's folder."""
    return f"checkpoints/round-{round_:06d}"


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
