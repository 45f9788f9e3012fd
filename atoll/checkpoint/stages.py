"""Checkpoints of a model in stages, each saved by a process of its own, without torch.distributed.

The format is that of `sharded.py`: the file of stage s stands where rank s would write its pieces,
under the names of the whole model. So one process, any mesh and any other number of stages loads
what a SWARM saved, and a SWARM loads what they saved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.checkpoint.files import write_file
from atoll.checkpoint.format.dcp_storage import PieceWriter, piece_file
from atoll.checkpoint.sharded import ABOUT_NAME, FORMAT, ShardedInfo, alone_quietly, entry, failed
from atoll.checkpoint.state.sharded_state import Trained
from atoll.checkpoint.stores.folder import Folder
from atoll.checkpoint.stores.store import versions
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
)
from atoll.wire.retention import Keep


def begin_stages(folder: Path, round_: int) -> None:
    """Make room for a round's files, once, before any stage is saved."""
    Folder(folder).begin(round_)


def save_stage(folder: Path, round_: int, stage: int, trained: Trained) -> ManifestPart:
    """Write the file of one stage between :func:`begin_stages` and :func:`publish_stages`.

    Raises:
        StorageFull: the disk is full; older checkpoints are untouched.
        CheckpointError: its optimizer is not over this stage.
    """
    writer = PieceWriter(copy=False)
    state = {**trained.model_tensors(), **trained.optimizer_tensors()}
    try:
        with alone_quietly():
            save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise failed(error, "written") from error
    name = piece_file(stage)
    written = writer.write(folder / checkpoint_folder(round_) / name, trained.texts())
    return entry(name, f"stage{stage}", written)


def publish_stages(
    folder: Path,
    round_: int,
    parts: Sequence[ManifestPart],
    about: ShardedInfo,
    *,
    keep: Keep | None = None,
) -> Manifest:
    """Complete a checkpoint of which every stage's file is written; `parts` are in their order."""
    files = Folder(folder, keep=keep, versions={**versions(), "format": FORMAT})
    place = folder / checkpoint_folder(round_)
    written = write_file(place / ABOUT_NAME, [msgspec.json.encode(about)])
    manifest = Manifest(
        job=files.job, round=round_, step=about.step, members=[part.member for part in parts],
        parts=[*parts, entry(ABOUT_NAME, parts[0].member, written)], created=time.time(),
        versions={**versions(), "format": FORMAT},
    )  # fmt: skip
    write_file(place / MANIFEST_NAME, [encode_manifest(manifest)])
    files.settle(round_)
    return manifest
