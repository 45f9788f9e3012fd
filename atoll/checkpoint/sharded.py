"""Checkpoints of models that no machine holds whole: FSDP2 and other DTensors.

    <folder>/checkpoints/round-000012/__0_0.distcp ...   what each rank holds
                                      .metadata          where each piece of a tensor lies
                                      about.json         texts and numbers of the caller
                                      manifest.json      hashes of all these, written last

`torch.distributed.checkpoint` writes and reads the pieces, so that as many ranks as there are can
load what any other number saved. What it lacks is added here: a checkpoint exists when its manifest
does, every file is checked before it is used, and a failure on one rank is raised on all.

All ranks see one folder. `.metadata` is a pickle: load checkpoints of people you trust.
"""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from atoll.checkpoint.files import Buffer, hash_file, write_file
from atoll.checkpoint.folder import Folder, check_part
from atoll.checkpoint.layout import lay_out
from atoll.checkpoint.store import versions
from atoll.errors import AtollError, CheckpointError, CheckpointMissing, StorageFull, from_dict
from atoll.wire.keeping import Keep
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
)

T = TypeVar("T")

ABOUT_NAME = "about.json"
FORMAT = "torch.distributed.checkpoint"
"""What a manifest's `versions` says under `format`."""

EXPORT_BYTES = 256 * 2**20
"""Tensors gathered in memory at a time while a checkpoint is exported."""

_MODEL = "model."
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class About(msgspec.Struct, frozen=True):
    """What the caller of `save_sharded` gave along."""

    step: int
    texts: dict[str, str] = {}
    numbers: dict[str, float] = {}


def save_sharded(
    folder: Path,
    round_: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    texts: Mapping[str, str] | None = None,
    numbers: Mapping[str, float] | None = None,
    job: str = "",
    keep: Keep | None = None,
    group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Save a sharded model and its optimizer; every rank calls this.

    Args:
        folder: The job's folder, the same for all ranks.
        round_: Rounds committed.
        model: With parameters that may be DTensors.
        optimizer: Over its parameters.
        step: Where the schedule stands.
        texts: Kept along, e.g. from `describe`; those of the first rank count.
        numbers: Kept along, too.
        job: Name for the manifest; the folder's by default.
        keep: Which older checkpoints are kept.
        group: The ranks; all by default. Without a process group this process is the only one.

    Raises:
        StorageFull: there is no room; older checkpoints are untouched.
        CheckpointError: a rank could not write.
    """
    ranks = _Ranks(group)
    files = Folder(folder, job=job, keep=keep, versions={**versions(), "format": FORMAT})
    place = folder / checkpoint_folder(round_)
    about = About(step, dict(texts or {}), dict(numbers or {}))
    ranks.first(lambda: files.begin(round_))
    state = _state(model, optimizer)
    try:
        with _alone_quietly():
            save(state, checkpoint_id=place, process_group=group, no_dist=not ranks.many)
    except CheckpointException as error:
        raise _told(error, place) from error
    except OSError as error:
        raise _told_os(error, place) from error
    ranks.first(lambda: write_file(place / ABOUT_NAME, [msgspec.json.encode(about)]) and None)
    parts = ranks.share(lambda: _hash(place, ranks))

    def publish() -> Manifest:
        manifest = Manifest(
            job=files.job, round=round_, step=step, members=ranks.names,
            parts=sorted((p for found in parts for p in found), key=lambda part: part.name),
            created=time.time(), versions={**versions(), "format": FORMAT},
        )  # fmt: skip
        write_file(place / MANIFEST_NAME, [encode_manifest(manifest)])
        files.settle(round_)
        return manifest

    return ranks.first(publish)


def load_sharded(
    folder: Path,
    round_: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> About:
    """Put a sharded checkpoint back, onto any number of ranks; every rank calls this.

    Raises:
        CheckpointMissing: there is no complete checkpoint of that round.
        CheckpointCorrupt: a file is damaged; it is named, on every rank.
        CheckpointError: it is of another model or optimizer.
    """
    ranks = _Ranks(group)
    about = _checked(folder, round_, ranks)
    state = _state(model, optimizer)
    try:
        place = Folder(folder).place(round_)
        with _alone_quietly():
            load(state, checkpoint_id=place, process_group=group, no_dist=not ranks.many)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )  # fmt: skip
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            "the sharded checkpoint does not fit this model or optimizer",
            given=" ".join(str(error).split())[:300],
            remedy="build the model and the optimizer as they were when it was saved",
        ) from error
    return about


def export_sharded(
    folder: Path, round_: int, target: Path, *, texts: Mapping[str, str] | None = None
) -> str:
    """Write the model of a sharded checkpoint as one safetensors file; return its SHA-256.

    One process does this alone, without the machines that saved. At most `EXPORT_BYTES`, or one
    tensor, are in memory at a time.

    Args:
        folder: The job's folder.
        round_: Which checkpoint.
        target: The file; it appears whole or not at all.
        texts: Metadata beside those that were saved.

    Raises:
        CheckpointMissing: there is no such checkpoint, or it is not sharded.
        CheckpointCorrupt: a file is damaged; it is named.
        StorageFull: the disk is full.
    """
    about = _checked(folder, round_, _Ranks(None))
    place = Folder(folder).place(round_)
    metadata = FileSystemReader(place).read_metadata()
    told = {**about.texts, "step": str(about.step), "round": str(round_), **(texts or {})}
    return write_file(target, _blocks(place, metadata, told)).sha256


class _Ranks:
    """The processes that save or load together; a failure on one is raised on all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.many = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.many else 0
        self.count = dist.get_world_size(group) if self.many else 1
        self.names = [f"rank{rank}" for rank in range(self.count)]

    def share(self, work: Callable[[], T]) -> list[T]:
        """Do work on every rank; return what each found."""
        value, error = None, None
        try:
            value = work()
        except AtollError as raised:
            error = raised.to_dict()
        except OSError as raised:
            error = _told_os(raised, Path(str(raised.filename or ""))).to_dict()
        found: list[Any] = [(value, error)]
        if self.many:
            found = [None] * self.count
            dist.all_gather_object(found, (value, error), group=self._group)
        for _, trouble in found:
            if trouble is not None:
                raise from_dict(trouble)
        return [each for each, _ in found]

    def first(self, work: Callable[[], T]) -> T:
        """Do work on the first rank only; every rank gets what it found."""
        return self.share(work if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return names -> tensors, of which each rank holds its piece."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}


def _hash(place: Path, ranks: _Ranks) -> list[ManifestPart]:
    """Return this rank's share of the files, hashed."""
    names = sorted(path.name for path in place.iterdir() if path.is_file())
    parts = []
    for name in names[ranks.rank :: ranks.count]:
        held = hash_file(place / name)
        parts.append(
            ManifestPart(
                name=name, member=f"rank{ranks.rank}", sha256=held.sha256, nbytes=held.nbytes
            )
        )
    return parts


def _checked(folder: Path, round_: int, ranks: _Ranks) -> About:
    """Compare all files with the manifest, each rank its share; return what was given along."""
    files = Folder(folder)

    def check() -> About:
        manifest = files.manifest(round_)
        if manifest.versions.get("format") != FORMAT:
            raise CheckpointMissing(
                f"the checkpoint of round {round_} is not a sharded one",
                given=str(files.place(round_)),
                remedy="load it with resume, or export it with atoll checkpoint export",
            )
        for part in manifest.parts[ranks.rank :: ranks.count]:
            check_part(files.place(round_) / part.name, part, round_=round_)
        return msgspec.json.decode((files.place(round_) / ABOUT_NAME).read_bytes(), type=About)

    return ranks.share(check)[0]


def _blocks(place: Path, metadata: Metadata, texts: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield the bytes of one safetensors file, gathering a few tensors at a time."""
    empty = {
        name.removeprefix(_MODEL): torch.empty(
            found.size, dtype=found.properties.dtype, device="meta"
        )
        for name, found in metadata.state_dict_metadata.items()
        if name.startswith(_MODEL) and isinstance(found, TensorStorageMetadata)
    }
    layout = lay_out(empty, texts)
    yield layout.head
    batch: dict[str, Tensor] = {}
    for index, spot in enumerate(layout.places):
        batch[_MODEL + spot.name] = torch.empty(spot.shape, dtype=spot.dtype)
        full = sum(t.nbytes for t in batch.values()) >= EXPORT_BYTES
        if full or index == len(layout.places) - 1:
            with _alone_quietly():
                load(dict(batch), checkpoint_id=place, no_dist=True)
            for tensor in batch.values():
                if tensor.numel():
                    yield tensor.reshape(-1).view(torch.uint8).numpy().data
            batch.clear()


@contextlib.contextmanager
def _alone_quietly() -> Iterator[None]:
    """Silence torch's warning that one process does it alone: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _told(error: CheckpointException, place: Path) -> AtollError:
    """Return what a failure of some ranks means."""
    causes = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
    for cause in causes.values():
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _told_os(cause, place)
    given = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items()))[:400]
    return CheckpointError("a sharded checkpoint could not be written", given=given)


def _told_os(error: OSError, place: Path) -> AtollError:
    if error.errno in _FULL:
        return StorageFull(
            "the disk is full, so a checkpoint was not written; older ones are still valid",
            given=f"{place}: {error.strerror}",
            remedy="make room there, or keep fewer with keep in [checkpoint]",
        )
    return CheckpointError("a sharded checkpoint could not be read or written", given=str(error))
