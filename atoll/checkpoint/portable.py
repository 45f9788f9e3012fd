"""Export and import a checkpoint's weights as plain safetensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from atoll.checkpoint.files import write_file
from atoll.checkpoint.format.nested import TREE
from atoll.checkpoint.format.part import STATE, part_blocks, read_part
from atoll.checkpoint.format.weights import MODEL_PREFIX, plain_names
from atoll.checkpoint.state.capture import weights_only
from atoll.checkpoint.stores.folder import Folder
from atoll.checkpoint.stores.store import SavePoint, stamped, versions
from atoll.errors import CheckpointCorrupt, CheckpointMissing
from atoll.wire.manifest import MANIFEST_NAME, SCORE, STAMP, Manifest, ManifestPart, encode_manifest

_OURS = (TREE, STATE, STAMP, SCORE)
"""Metadata of a shared part that have no meaning outside a checkpoint."""


def export_weights(
    shared: Path, target: Path, *, texts: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Write the model in a shared part under its plain names; return SHA-256 and size.

    Args:
        shared: A checkpoint's `shared.safetensors`.
        target: The file, written atomically.
        texts: Further metadata.

    Raises:
        CheckpointMissing: the part holds no model, because each member kept its own.
        CheckpointCorrupt: it is damaged.
        StorageFull: the disk is full.
    """
    part = read_part(shared)
    tensors = {name: t for name, t in part.tensors.items() if name.startswith(MODEL_PREFIX)}
    if not tensors:
        raise CheckpointMissing("there is no model in this part", given=str(shared))
    kept = {name: text for name, text in part.metadata.items() if name not in _OURS}
    written = write_file(target, part_blocks(plain_names(tensors), {**kept, **(texts or {})}))
    return written.sha256, written.nbytes


def import_weights(
    source: Path, folder: Path, *, job: str = "", about: Mapping[str, str] | None = None
) -> Manifest:
    """Make a checkpoint of round 0 from plain weights, from which a run can start.

    It has no member parts: a run that resumes it loads the model and starts everything else anew.

    Args:
        source: A safetensors file with the model's own names.
        folder: The job's folder.
        job: Name for the manifest; the folder's by default.
        about: Metadata to rebuild the model (see `describe`), added to those of the file.

    Raises:
        CheckpointMissing: there is no such file.
        CheckpointCorrupt: it is no safetensors file.
        StorageFull: the disk is full; existing files stay.
    """
    if not source.is_file():
        raise CheckpointMissing("there are no weights", given=str(source))
    try:
        part = read_part(source)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            error.what,
            given=error.given,
            expected=error.expected,
            remedy="convert a pickled file (.pt, .bin) with safetensors.torch.save_file first",
        ) from error
    shared = weights_only(plain_names(part.tensors), about={**part.metadata, **(about or {})})
    _, (ready,) = stamped([shared], SavePoint(0, 0, "", []))
    files = Folder(folder, job=job, versions=versions())
    place = files.begin(0)
    written = write_file(place / ready.name, part_blocks(ready.tensors, ready.metadata))
    entry = ManifestPart(name=ready.name, member="", sha256=written.sha256, nbytes=written.nbytes)
    manifest = Manifest(
        job=files.job, round=0, step=0, members=[], parts=[entry], created=time.time(),
        versions=versions(),
    )  # fmt: skip
    write_file(place / MANIFEST_NAME, [encode_manifest(manifest)])
    files.settle(0)
    return manifest
