"""Save checkpoints in the background: the training thread only copies tensors.

  training thread    save(): copies the tensors into an image in shared memory
  supervisor thread  passes the image to the writer process, announces delivered parts to the hub,
                     and restarts the writer when it dies
  writer process     hashes, writes, flushes, publishes, uploads, copies (see `writer`)

State that is sharded over the ranks of an island goes into a file instead (see `disk_image`),
because no rank has memory for all of it.

There are two images. While one is written, a further save is skipped and reported; the last save of
a run uses the other image. After a writer died, the newest image is written again: every step of a
write can be repeated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint.background.messages import (
    FolderTarget,
    HubTarget,
    WriteOrder,
    WriterSetup,
)
from atoll.checkpoint.background.supervisor import Supervisor
from atoll.checkpoint.background.writer_process import COMMAND
from atoll.checkpoint.files import Moment, unobserved
from atoll.checkpoint.format.disk_image import DiskImage
from atoll.checkpoint.format.memory_image import MemoryImage, image_nbytes
from atoll.checkpoint.format.part import Part
from atoll.checkpoint.shared_memory import PAGE_BYTES, Region, SharedMemory, remove_leftovers
from atoll.checkpoint.stores.store import SavePoint, stamped, versions
from atoll.errors import CheckpointError, StorageFull
from atoll.task import RemoteState
from atoll.wire.messages import CheckpointPart, Event

logger = logging.getLogger(__name__)

IMAGES = 2
FINAL_WAIT_S = 30.0
"""How long the last save waits for a free image."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The state was copied; it will be written."""

    nbytes: int
    blocked_s: float
    """Seconds the training thread spent in `save`."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The state was not copied; the next save is tried as usual."""

    reason: str


class BackgroundSaver:
    """Saves one member's checkpoints; `save` may be called by one thread at a time.

    Args:
        target: Where checkpoints go.
        scratch: Folder of this process, for images if memory is short.
        publish: Announces a part at the hub and returns whether the checkpoint is complete; called
            in a thread of the saver, repeated while the hub does not answer.
        on_event: Called with events for people, from a thread of the saver; MUST NOT block.
        command: The writer's program; for tests.
        moment: Called at every point of a save; for tests.
    """

    def __init__(
        self,
        target: FolderTarget | HubTarget,
        *,
        scratch: Path,
        publish: Callable[[CheckpointPart], bool] | None = None,
        on_event: Callable[[Event], None] | None = None,
        command: Sequence[str] = COMMAND,
        moment: Moment = unobserved,
    ) -> None:
        """Start the writer in the background; returns at once.

        Raises:
            CheckpointError: the target is a hub and `publish` is missing.
        """
        if isinstance(target, HubTarget) and publish is None:
            raise CheckpointError("checkpoints at a hub need `publish`", given=target.url)
        scratch = scratch.resolve()
        remove_leftovers(scratch)
        self._memories = [SharedMemory(scratch=scratch) for _ in range(IMAGES)]
        self._files = [DiskImage(scratch) for _ in range(IMAGES)]
        self._moment = moment
        self._versions = versions()
        self._last: tuple[str, Saved] | None = None
        self._growing = threading.Lock()
        self._supervisor = Supervisor(
            WriterSetup(target),
            inherited=[m.inherited for m in self._memories if m.inherited >= 0],
            publish=publish,
            on_event=on_event,
            command=command,
            moment=moment,
        )

    def save(
        self, point: SavePoint, parts: Sequence[Part], *, final: bool = False
    ) -> Saved | Skipped:
        """Copy the state right after a committed round; it is written in the background.

        Args:
            point: The round.
            parts: As for `Store.put`; the tensors MUST NOT change during the call.
            final: The last save of the run, which must not be skipped.

        Raises:
            CheckpointError: a tensor's type cannot be saved.
        """
        began = time.monotonic()
        stamp, ready = stamped(parts, point)
        if self._last is not None and self._last[0] == stamp and not self._supervisor.lost:
            return self._last[1]  # e.g. a stop right after this round was saved anyway
        slot = self._supervisor.free_slot(wait_s=FINAL_WAIT_S if final else 0.0, urgent=final)
        if slot is None:
            return self._skip(point, "the checkpoint before is still being written")
        try:
            with self._growing:
                regions = self._copy(ready, slot)
                self._moment("image made")
                order = WriteOrder(
                    number=0,
                    round=point.round,
                    step=point.step,
                    stamp=stamp,
                    members=list(point.members),
                    regions=regions,
                    versions=self._versions,
                )
                # Before `reserve` may ask for a free image, and move this one.
                self._supervisor.take(order, slot=slot)
        except (StorageFull, OSError, MemoryError) as error:
            return self._skip(point, f"there is no room for its image: {error}")
        saved = Saved(sum(r.nbytes for r in regions), time.monotonic() - began)
        self._last = (stamp, saved)
        return saved

    def reserve(self, nbytes: int) -> None:
        """Allocate images of that size ahead, in the background; returns at once."""

        def grow() -> None:
            with self._growing:
                if self._supervisor.free_slot(wait_s=0.0, urgent=False) == 0:
                    try:
                        self._memories[0].view(nbytes + IMAGES * PAGE_BYTES).release()
                    except (StorageFull, OSError, MemoryError) as error:
                        logger.warning("no memory for checkpoints ahead of time: %s", error)

        threading.Thread(target=grow, name="checkpoint-memory", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every accepted save is written; return whether it is.

        For a hub this includes the announcement, for a folder the copies elsewhere, as far as the
        time suffices.
        """
        return self._supervisor.wait(timeout_s)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Wait like `wait`, then end the writer; repeated calls do nothing."""
        done = self.wait(timeout_s)
        self.abandon()
        return done

    def abandon(self) -> None:
        """End the writer at once; unwritten state is lost, older checkpoints are not."""
        self._supervisor.close()
        with self._growing:
            for memory in self._memories:
                memory.close()
            for file in self._files:
                file.close()

    @property
    def writer_pid(self) -> int:
        """Process id of the writer; 0 while there is none."""
        return self._supervisor.writer_pid

    def _copy(self, parts: Sequence[Part], slot: int) -> list[Region]:
        """Copy parts into an image; return their regions."""
        if any(
            isinstance(tensor, RemoteState) for part in parts for tensor in part.tensors.values()
        ):
            return self._files[slot].write(parts)
        memory = self._memories[slot]
        sizes = [image_nbytes(part) for part in parts]
        offsets = [sum(_pages(size) for size in sizes[:index]) for index in range(len(sizes))]
        with memory.view(sum(map(_pages, sizes))) as view:
            place = memory.place
            for part, size, offset in zip(parts, sizes, offsets, strict=True):
                with view[offset : offset + size] as target:
                    MemoryImage(part, buffer=target).release()
        return [
            Region(part.name, size, offset, place.descriptor, place.path)
            for part, size, offset in zip(parts, sizes, offsets, strict=True)
        ]

    def _skip(self, point: SavePoint, reason: str) -> Skipped:
        text = f"{point.member}: the checkpoint of round {point.round} is skipped: {reason}"
        self._supervisor.tell("checkpoint-skipped", text, round_=point.round)
        return Skipped(reason)


def _pages(nbytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
