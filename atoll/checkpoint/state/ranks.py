"""Collective work of the ranks that save or load one checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from atoll.errors import AtollError, CheckpointError, StorageFull, from_dict

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class RankGroup:
    """The processes of a group; a failure on one is raised on all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Wrap a group; None: all processes, or only this one without a process group."""
        self.group = group
        self.many = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.many else 0
        self.count = dist.get_world_size(group) if self.many else 1
        self.names = [f"rank{rank}" for rank in range(self.count)]

    def share(self, work: Callable[[], T]) -> list[T]:
        """Do work on every rank; return the results of all.

        Raises:
            AtollError: it failed on some rank; on that one any other error is raised as it is.
        """
        value, error, defect = None, None, None
        try:
            value = work()
        except AtollError as raised:
            error = raised.to_dict()
        except OSError as raised:
            error = storage_error(raised, Path(str(raised.filename or ""))).to_dict()
        except Exception as raised:  # the other ranks wait for this one
            defect = raised
            error = CheckpointError(
                "a rank failed", given=f"rank {self.rank}: {type(raised).__name__}: {raised}"
            ).to_dict()
        found: list[Any] = [(value, error)]
        if self.many:
            found = [None] * self.count
            dist.all_gather_object(found, (value, error), group=self.group)
        if defect is not None:
            raise defect
        for _, trouble in found:
            if trouble is not None:
                raise from_dict(trouble)
        return [each for each, _ in found]

    def each(self, work: Callable[[], T]) -> T:
        """Do work on every rank; return this rank's result, if none failed."""
        found: list[T] = []
        self.share(lambda: found.append(work()))
        return found[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do work on the first rank only; every rank gets the result."""
        return self.share(work if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]


def storage_error(error: OSError, place: Path) -> AtollError:
    """Return the error for a failure of the file system."""
    if error.errno in _FULL:
        return StorageFull(
            "the disk is full, so a checkpoint was not written",
            given=f"{place}: {error.strerror}",
            remedy="free some disk space, or keep fewer with keep in [checkpoint]",
        )
    return CheckpointError("a sharded checkpoint could not be read or written", given=str(error))
