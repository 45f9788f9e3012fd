"""Storage for `torch.distributed.checkpoint`: pieces of tensors in safetensors files.

    rank-00003.safetensors    the pieces that rank 3 wrote; the header says of each where it begins
                              in its tensor and how large that is

torch's planner decides which rank writes which piece (replicated pieces once) and which pieces a
rank reads, on any mesh. The storage is plain safetensors instead of pickle, so that loading an
untrusted checkpoint runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from atoll.checkpoint.files import Written, write_file
from atoll.checkpoint.format.part import part_blocks
from atoll.checkpoint.format.pieces import PIECES, Pieces
from atoll.errors import CheckpointError


class PieceWriter(StorageWriter):
    """Collects the pieces a rank has to write; `write` saves them to the rank's file.

    Planning, which is collective, is thus separate from writing, which is not.
    """

    def __init__(self, *, copy: bool) -> None:
        """Keep the tensors themselves, or copies of them in main memory."""
        self._copy = copy
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[str, list[list[int]]] = {}

    def write(self, path: Path, texts: Mapping[str, str]) -> Written:
        """Write the pieces atomically, and release them, also if that fails.

        Raises:
            StorageFull: the disk is full.
            CheckpointError: a tensor's type cannot be saved.
        """
        metadata = {**texts, PIECES: json.dumps(self._places)}
        try:
            return write_file(path, part_blocks(self._tensors, metadata))
        finally:
            self._tensors.clear()  # the traceback of an error refers to the same dictionary

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Collect the pieces of a plan."""
        results = []
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            if not isinstance(data, Tensor) or item.tensor_data is None or name in self._tensors:
                raise CheckpointError(
                    f"{name} cannot be saved", given=type(data).__name__,
                    expected="one piece of a tensor per rank",
                )  # fmt: skip
            kept = data.detach()
            if self._copy:
                kept = kept.cpu().clone() if kept.device.type == "cpu" else kept.cpu()
            self._tensors[name] = kept
            offsets, size = item.tensor_data.chunk.offsets, item.tensor_data.size
            self._places[name] = [list(offsets), list(size)]
            results.append(WriteResult(item.index, kept.nbytes, None))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: every file describes itself."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the name is not used."""
        return True


class PieceReader(StorageReader):
    """Serves pieces to the planner of `torch.distributed.checkpoint`."""

    def __init__(self, pieces: Pieces) -> None:
        """Read from opened files."""
        self._cuts = pieces.cuts

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which pieces there are."""
        found: dict[str, Any] = {}
        for name, cut in self._cuts.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
                for piece in cut.pieces
            ]
            properties = TensorProperties(dtype=cut.dtype)
            found[name] = TensorStorageMetadata(properties, torch.Size(cut.size), chunks)
        return Metadata(state_dict_metadata=found, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the pieces of a plan into the rank's own tensors."""
        held = {
            (name, piece.offsets): piece.tensor
            for name, cut in self._cuts.items()
            for piece in cut.pieces
        }
        for item in plan.items:
            source = held[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            wanted = source[tuple(slice(start, start + length) for start, length in spans)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(wanted)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the name is not used."""
        return True
