"""Sharded checkpoints of models too large for one machine: every rank saves and loads its pieces.

    <folder>/checkpoints/round-000012/rank-00000.safetensors ...   the pieces that each rank wrote
                                      about.json                   texts and numbers of the caller
                                      manifest.json                hashes of all these, written last

The planner of `torch.distributed.checkpoint` decides which rank writes and reads which piece, so
any mesh loads what any other saved; `dcp_storage` stores them. A checkpoint exists once its
manifest does, every file is verified before use, and a failure on one rank is raised on all. No
pickle is used. All ranks share one folder.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.checkpoint.files import Buffer, Written, write_file
from atoll.checkpoint.format.dcp_storage import PieceReader, PieceWriter
from atoll.checkpoint.format.layout import lay_out
from atoll.checkpoint.format.pieces import Pieces, entry
from atoll.checkpoint.format.pieces import ShardedInfo as ShardedInfo
from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.checkpoint.state.ranks import RankGroup, storage_error
from atoll.checkpoint.state.same_model import check_same_model, check_same_optimizer
from atoll.checkpoint.state.sharded_state import Trained as Trained
from atoll.checkpoint.stores.folder import Folder
from atoll.checkpoint.stores.store import versions
from atoll.errors import AtollError, CheckpointError, CheckpointMissing
from atoll.wire.manifest import (
    ABOUT_NAME,
    MANIFEST_NAME,
    PART_SUFFIX,
    PIECES_FORMAT,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
    piece_file,
)
from atoll.wire.part_check import check_part
from atoll.wire.retention import Keep


class ShardedSave:
    """A checkpoint being written: planned and copied, incomplete before `finish`."""

    def __init__(
        self, files: Folder, round_: int, about: ShardedInfo, ranks: RankGroup, writer: PieceWriter
    ) -> None:
        self._files, self._round, self._about, self._ranks = files, round_, about, ranks
        self._writer = writer
        self._written: Written | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def write(self, texts: Mapping[str, str]) -> None:
        """Write this rank's file."""
        place = self._files.path / checkpoint_folder(self._round)
        try:
            self._written = self._writer.write(place / piece_file(self._ranks.rank), texts)
        except Exception as error:  # reported by `finish`, on every rank
            self._error = error

    def write_beside(self, texts: Mapping[str, str]) -> None:
        """Write this rank's file in a thread; returns at once."""
        self._thread = threading.Thread(
            target=self.write, args=(texts,), name="sharded-checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def written(self) -> bool:
        """Whether this rank's file is written, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Manifest:
        """Wait for every rank's file, then complete the checkpoint; collective.

        Raises:
            StorageFull: the disk is full; older checkpoints are untouched.
            CheckpointError: a rank could not write.
        """
        if self._thread is not None:
            self._thread.join()
        parts = self._ranks.share(self._part)
        return self._ranks.first(lambda: self._publish(parts))

    def _part(self) -> ManifestPart:
        place = self._files.path / checkpoint_folder(self._round)
        if isinstance(self._error, OSError):
            raise storage_error(self._error, place)
        if self._error is not None or self._written is None:
            if isinstance(self._error, AtollError):
                raise self._error
            raise CheckpointError(
                "a sharded checkpoint could not be written",
                given=f"rank {self._ranks.rank}: {self._error}",
            )
        return entry(piece_file(self._ranks.rank), f"rank{self._ranks.rank}", self._written)

    def _publish(self, parts: list[ManifestPart]) -> Manifest:
        place = self._files.path / checkpoint_folder(self._round)
        written = write_file(place / ABOUT_NAME, [msgspec.json.encode(self._about)])
        manifest = Manifest(
            job=self._files.job, round=self._round, step=self._about.step,
            members=self._ranks.names, parts=[*parts, entry(ABOUT_NAME, "rank0", written)],
            created=time.time(), versions={**versions(), "format": PIECES_FORMAT},
        )  # fmt: skip
        write_file(place / MANIFEST_NAME, [encode_manifest(manifest)])
        self._files.settle(self._round)
        return manifest


def save_sharded(
    folder: Path,
    round_: int,
    trained: Trained,
    about: ShardedInfo,
    *,
    keep: Keep | None = None,
    group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Save a model and its optimizer from all ranks; collective.

    No rank holds more than its own pieces; replicated pieces are written by one rank.

    Args:
        folder: The job's folder, the same for all ranks.
        round_: Rounds committed.
        trained: This rank's piece of model and optimizer.
        about: Metadata; those of the first rank are used.
        keep: Which older checkpoints are kept.
        group: The ranks; all by default. Without a process group this process is the only one.

    Raises:
        StorageFull: the disk is full; older checkpoints are untouched.
        CheckpointError: a rank could not write, or its optimizer is not over this model.
    """
    saving = _begin(folder, round_, trained, about, keep=keep, group=group, copy=False)
    saving.write(trained.texts())
    return saving.finish()


def start_sharded(
    folder: Path,
    round_: int,
    trained: Trained,
    about: ShardedInfo,
    *,
    keep: Keep | None = None,
    group: dist.ProcessGroup | None = None,
) -> ShardedSave:
    """Like `save_sharded`, but copy the pieces and write them in the background.

    Every rank calls this, and later `finish` of the result; without that call the checkpoint does
    not exist. Until then each rank's main memory holds a copy of its pieces.
    """
    saving = _begin(folder, round_, trained, about, keep=keep, group=group, copy=True)
    saving.write_beside(trained.texts())
    return saving


def _begin(
    folder: Path, round_: int, trained: Trained, about: ShardedInfo, *, keep: Keep | None,
    group: dist.ProcessGroup | None, copy: bool,
) -> ShardedSave:  # fmt: skip
    """Plan the save and collect the pieces; collective."""
    ranks = RankGroup(group)
    files = Folder(folder, keep=keep, versions={**versions(), "format": PIECES_FORMAT})
    about = msgspec.structs.replace(about, ties={**trained.ties, **about.ties})

    def tensors() -> dict[str, Tensor]:
        return {**trained.model_tensors(), **trained.optimizer_tensors()}

    ranks.first(lambda: files.begin(round_) and None)
    state = ranks.each(tensors)  # refuses on all ranks what one cannot name
    writer = PieceWriter(copy=copy)
    try:
        with alone_quietly():
            save(state, storage_writer=writer, process_group=group, no_dist=not ranks.many)
    except CheckpointException as error:
        raise failed(error, "written") from error
    return ShardedSave(files, round_, about, ranks, writer)


def load_sharded(
    folder: Path,
    round_: int,
    trained: Trained,
    *,
    group: dist.ProcessGroup | None = None,
    partly: bool = False,
) -> ShardedInfo:
    """Load a sharded checkpoint onto any number of ranks and any mesh; collective.

    Args:
        folder: The job's folder.
        round_: Which checkpoint.
        trained: As for `save_sharded`; its tensors are filled in place.
        group: The ranks; all by default.
        partly: The ranks together have only a part of the model, e.g. one stage.

    Raises:
        CheckpointMissing: there is no complete checkpoint of that round.
        CheckpointCorrupt: a file is damaged; it is named, on every rank.
        CheckpointError: it is of another model or optimizer; names and shapes are in the message.
    """
    ranks = RankGroup(group)
    about, pieces = _opened(folder, round_, ranks)
    wanted = trained.model_tensors()
    shapes = ranks.share(lambda: {name: tuple(t.shape) for name, t in wanted.items()})
    sizes = {name: size for held in shapes for name, size in held.items()}
    check_same_model(pieces, sizes, partly=partly)
    cuts = {name: (cut.size, cut.dtype) for name, cut in pieces.cuts.items()}

    def room() -> dict[str, Tensor]:
        check_same_optimizer(pieces, trained)
        return trained.room_for(cuts)

    states = ranks.each(room)
    try:
        with alone_quietly(), torch.no_grad():
            load(
                {**wanted, **states}, storage_reader=PieceReader(pieces), process_group=group,
                no_dist=not ranks.many,
            )  # fmt: skip
    except CheckpointException as error:
        raise failed(error, "loaded") from error
    trained.take_up(states, pieces.texts)
    return about


def export_sharded(
    folder: Path, round_: int, target: Path, *, texts: Mapping[str, str] | None = None
) -> str:
    """Write the model of a sharded checkpoint as one safetensors file; return its SHA-256.

    Runs in one process, without the machines that saved; one tensor is in memory at a time.

    Args:
        folder: The job's folder.
        round_: Which checkpoint.
        target: The file, written atomically.
        texts: Further metadata.

    Raises:
        CheckpointMissing: there is no such checkpoint, or it is not sharded.
        CheckpointCorrupt: a file is damaged; it is named.
        StorageFull: the disk is full.
    """
    about, pieces = _opened(folder, round_, RankGroup(None))
    metadata = {**about.texts, "step": str(about.step), "round": str(round_), **(texts or {})}
    return write_file(target, _blocks(pieces, about.ties, metadata)).sha256


def _blocks(
    pieces: Pieces, ties: Mapping[str, str], metadata: Mapping[str, str]
) -> Iterator[Buffer]:
    """Yield the bytes of one safetensors file, assembling one tensor at a time."""
    names = {
        name.removeprefix(MODEL_PREFIX): name
        for name in pieces.cuts
        if name.startswith(MODEL_PREFIX)
    }
    names |= {tie: names[name] for tie, name in ties.items() if name in names}
    empty = {
        name: torch.empty(pieces.cuts[full].size, dtype=pieces.cuts[full].dtype, device="meta")
        for name, full in names.items()
    }
    layout = lay_out(empty, metadata)
    yield layout.head
    for spot in layout.places:
        whole = pieces.cuts[names[spot.name]].whole()
        if whole.numel():
            yield whole.reshape(-1).view(torch.uint8).numpy().data


def _opened(folder: Path, round_: int, ranks: RankGroup) -> tuple[ShardedInfo, Pieces]:
    """Verify all files against the manifest, each rank a share of them, and open them."""
    files = Folder(folder)

    def check() -> bytes:
        manifest = files.manifest(round_)
        if manifest.versions.get("format") != PIECES_FORMAT:
            raise CheckpointMissing(
                f"the checkpoint of round {round_} is not a sharded one",
                given=str(files.place(round_)),
                remedy="load it with resume, or export it with atoll checkpoint export",
            )
        for part in manifest.parts[ranks.rank :: ranks.count]:
            check_part(files.place(round_) / part.name, part, round_=round_)
        return (files.place(round_) / ABOUT_NAME).read_bytes()

    def open_() -> Pieces:
        place = files.place(round_)
        names = [part.name for part in files.manifest(round_).parts]
        return Pieces(place / name for name in names if name.endswith(PART_SUFFIX))

    about = ranks.share(check)[0]  # decoded once all ranks have found their files undamaged
    return msgspec.json.decode(about, type=ShardedInfo), ranks.each(open_)


@contextlib.contextmanager
def alone_quietly() -> Iterator[None]:
    """Silence torch's warning about running in a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def failed(error: CheckpointException, what: str) -> AtollError:
    """Return the error for a failure of some ranks."""
    causes = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
    text = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items()))[:400]
    return CheckpointError(f"a sharded checkpoint could not be {what}", given=text)
