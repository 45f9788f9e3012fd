"""A member's batches: at first those that all share, if the strategy wants that, then its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from atoll.data import BatchStream, Cursor, Shards


class MemberStream(Iterator[tuple[Tensor, Tensor]]):
    """Batches of slot 0 for the first `shared_steps` steps, then those of the own slot.

    The member of slot 0 simply goes on; the others begin at the start of their own shards.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        slot: int,
        batch: int,
        step: int = 0,
        shared_steps: int = 0,
        cursor: Cursor | None = None,
    ) -> None:
        """Start before step `step`, at a saved place or at the beginning."""
        self._shards, self._slot, self._batch = shards, slot, batch
        self._left = max(0, shared_steps - step)
        first = 0 if self._left else slot
        self._stream = BatchStream(shards, slot=first, batch=batch, cursor=cursor)

    @property
    def cursor(self) -> Cursor:
        """The place after the last batch."""
        return self._stream.cursor

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        if self._left:
            self._left -= 1
            batch = next(self._stream)
            if not self._left and self._slot != 0:
                self._stream = BatchStream(self._shards, slot=self._slot, batch=self._batch)
            return batch
        return next(self._stream)
