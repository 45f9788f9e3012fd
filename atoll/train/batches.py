"""A member's stream of batches: first from the shared slot if the strategy asks, then its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from atoll.data import BatchStream, Cursor, Deal
from atoll.devices.choose import CPU
from atoll.devices.transfer import Ahead


class BatchesAhead(Iterator[tuple[Tensor, Tensor]]):
    """The batches of a stream on an accelerator.

    While it computes on one, a thread takes the next one, and copies it if the device can copy
    while it computes. `cursor` is the position after the last batch that was returned.
    """

    def __init__(
        self, stream: BatchStream, *, device: torch.device, thread: ThreadPoolExecutor
    ) -> None:
        """Draw from `stream`, which nothing else may use, in a thread of its own."""
        self._stream, self._thread = stream, thread
        self._ahead = Ahead(device)
        self._drawing: Future[Cursor] | None = None
        self.cursor = stream.cursor

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next batch, and begin to draw another."""
        drawing = self._drawing or self._thread.submit(self._draw)
        self._drawing = None
        self.cursor = drawing.result()
        batch: tuple[Tensor, Tensor] = self._ahead.take()
        self._drawing = self._thread.submit(self._draw)
        return batch

    def _draw(self) -> Cursor:
        self._ahead.start(next(self._stream))
        return self._stream.cursor


class MemberStream(Iterator[tuple[Tensor, Tensor]]):
    """Batches of slot 0 for the first `shared_steps` steps, then those of the leased slot.

    The member of slot 0 continues after the shared steps; the others begin at the start of their
    own shards. The group may lease another slot to a member after any round (see
    :class:`atoll.task.DataStretch`).
    """

    def __init__(
        self,
        shards: Deal,
        *,
        slot: int,
        batch: int,
        step: int = 0,
        shared_steps: int = 0,
        cursor: Cursor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Start before step `step`, at `cursor` or at the beginning of the data.

        Batches are on `device`; None: in main memory.
        """
        self._shards, self._slot, self._batch = shards, slot, batch
        self._shared_steps = shared_steps
        self._device = device if device is not None and device.type != CPU else None
        self._thread = ThreadPoolExecutor(1, "batches") if self._device is not None else None
        self._begin(step, cursor)

    def rejoin(self, step: int) -> None:
        """Continue before step `step` of the schedule, at the own slot's cursor."""
        self._begin(step, self.cursor if self.place() is not None else None)

    def _begin(self, step: int, cursor: Cursor | None) -> None:
        self._left = max(0, self._shared_steps - step)
        first = 0 if self._left else (cursor.slot if cursor is not None else self._slot)
        start = cursor if cursor is not None and cursor.slot == first else None
        self._stream = self._from(first, start)

    def _from(self, slot: int, cursor: Cursor | None = None) -> BatchStream | BatchesAhead:
        stream = BatchStream(self._shards, slot=slot, batch=self._batch, cursor=cursor)
        if self._device is None or self._thread is None:
            return stream
        return BatchesAhead(stream, device=self._device, thread=self._thread)

    @property
    def cursor(self) -> Cursor:
        """The position after the last batch."""
        return self._stream.cursor

    def place(self) -> tuple[int, dict[str, int]] | None:
        """Return the slot and its position; None while this member reads another member's slot."""
        cursor = self._stream.cursor
        if self._left and self._slot != 0:
            return None
        return cursor.slot, cursor.to_dict()

    def place_after(self, steps: int) -> tuple[int, dict[str, int]] | None:
        """See :class:`atoll.task.DataStretch`; not known while all members share slot 0."""
        if self._left:
            return None
        cursor = self._stream.cursor
        size = self._shards.num_windows(cursor.slot)
        passes, offset = divmod(cursor.offset + steps * self._batch, size)
        there = Cursor(cursor.slot, cursor.data_pass + passes, offset)
        return cursor.slot, there.to_dict()

    def move(self, slot: int, cursor: Mapping[str, int]) -> None:
        """Continue with `slot` at `cursor`; does nothing while all members share slot 0.

        Raises:
            DataError: the position does not exist in this member's data.
        """
        if self._left:
            self._slot = slot
            return
        place = Cursor.from_dict(cursor) if cursor else Cursor(slot)
        if place != self._stream.cursor:
            self._stream = self._from(slot, place)

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets."""
        if self._left:
            self._left -= 1
            batch = next(self._stream)
            if not self._left and self._slot != 0:
                self._stream = self._from(self._slot)
            return batch
        return next(self._stream)
