"""The checkpoint store interface, and a store in a folder of files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from platform import python_version
from typing import Protocol

import torch

from atoll import __version__
from atoll.checkpoint.files import Moment, unobserved
from atoll.checkpoint.format.part import STATE, Part, part_blocks, read_part
from atoll.checkpoint.stores.folder import Folder, PartFile
from atoll.errors import CheckpointCorrupt
from atoll.wire.manifest import SCORE, SHARED_PART, STAMP, Manifest, stamp_of
from atoll.wire.retention import Keep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavePoint:
    """The committed round that a member saves, and the members that save it."""

    round: int
    """Rounds committed when the state was captured."""
    step: int
    """Step of the schedule; equal on all members."""
    member: str
    """The saving member."""
    members: Sequence[str]
    """Members whose parts make the checkpoint complete: those of the last round."""
    score: float | None = None
    """Held-out loss of the state, for keeping the best; from the member that writes the shared
    part."""

    @property
    def shared(self) -> bool:
        """Whether this member writes the shared part."""
        return self.member == self.members[0]


class Store(Protocol):
    """Keeps checkpoints of one job."""

    def put(self, point: SavePoint, parts: Sequence[Part]) -> bool:
        """Save the parts of one member; return whether the checkpoint is complete now.

        MUST NOT damage an older checkpoint, even when interrupted. `parts` are the member's own
        part, and the shared one if this member writes it.

        Raises:
            StorageFull: the disk is full.
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

    Several members, as threads or processes, may put into one folder: the one that finds all parts
    writes the manifest.

    Args:
        folder: The job's folder, `runs/<job>`.
        job: Name for the manifest; the folder's by default.
        keep: How many complete checkpoints are kept, or a whole rule.
        wall: Seconds since 1970, for the manifest.
        moment: Called at every point of a write; for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job: str = "",
        keep: int | Keep = 2,
        wall: Callable[[], float] = time.time,
        moment: Moment = unobserved,
    ) -> None:
        self.folder = folder
        rule = keep if isinstance(keep, Keep) else Keep(newest=keep)
        self._files = Folder(
            folder, job=job, keep=rule, versions=versions(), wall=wall, moment=moment
        )

    def put(self, point: SavePoint, parts: Sequence[Part]) -> bool:
        """Save the parts of one member; return whether the checkpoint is complete now.

        Parts of an earlier attempt at the same round, with another state, do not count.

        Raises:
            StorageFull: the disk is full; older checkpoints are untouched.
        """
        stamp, ready = stamped(parts, point)
        files = [PartFile(p.name, partial(part_blocks, p.tensors, p.metadata)) for p in ready]
        return self._files.put(
            point.round, files, stamp=stamp, step=point.step, members=point.members
        )

    def get(self, round_: int, *, names: Collection[str]) -> dict[str, Part]:
        """Return parts by name, checked against the manifest; names it does not list are absent.

        Raises:
            CheckpointMissing: there is no complete checkpoint of that round.
            CheckpointCorrupt: a part is missing, truncated or altered; it is named.
        """
        paths = self._files.check(round_, names=names)
        return {name: read_part(path) for name, path in paths.items()}

    def manifest(self, round_: int) -> Manifest:
        """Return what a complete checkpoint consists of; raises as `get` does."""
        return self._files.manifest(round_)

    def latest(self) -> int:
        """Return the round of the newest undamaged checkpoint, or -1.

        Every part is read and hashed; a damaged checkpoint is passed over with a warning.
        """
        for round_ in sorted(self._files.complete(), reverse=True):
            try:
                self._files.check(round_)
            except CheckpointCorrupt as error:
                logger.warning("checkpoint of round %d is skipped: %s", round_, error)
                continue
            return round_
        return -1

    def verify(self, round_: int) -> Manifest:
        """Check the hash of every part and return the manifest; raises as `get` does."""
        self._files.check(round_)
        return self._files.manifest(round_)

    def abandon(self, *, after: int) -> list[int]:
        """Delete the checkpoints of rounds later than `after`; return their rounds.

        Call it once when a job resumes from an older round, which replaces the later ones.
        """
        return self._files.abandon(after=after)


def versions() -> dict[str, str]:
    """Return the program versions for a manifest."""
    return {"atoll": __version__, "torch": str(torch.__version__), "python": python_version()}


def stamped(parts: Sequence[Part], point: SavePoint) -> tuple[str, list[Part]]:
    """Return a checkpoint's stamp, and one member's parts with it in their metadata.

    Tensors are not copied; the score goes into the shared part.
    """
    states = [part.metadata.get(STATE, "") for part in parts]
    stamp = stamp_of(round_=point.round, step=point.step, states=states)
    score = {} if point.score is None else {SCORE: repr(float(point.score))}
    return stamp, [
        _with(part, {STAMP: stamp, **(score if part.name == SHARED_PART else {})}) for part in parts
    ]


def _with(part: Part, texts: Mapping[str, str]) -> Part:
    return Part(part.name, part.tensors, {**part.metadata, **texts})
