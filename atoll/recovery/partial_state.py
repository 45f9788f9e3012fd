"""An image that is being fetched: its chunks, and to which donors they are assigned."""

from __future__ import annotations

import bisect

import torch

from atoll.recovery.source import SourceCorrupt, SourceFailed
from atoll.wire.recovery_messages import StateManifest

DUPLICATE_AFTER_S = 0.5
"""When no chunk is unassigned, one assigned this long ago is requested from a second donor."""


class PartialState:
    """The buffer of an image. `check` is thread-safe; all else needs the scheduler's lock."""

    def __init__(self, manifest: StateManifest) -> None:
        """Allocate the buffer.

        Raises:
            SourceFailed: there is not enough memory.
        """
        self.manifest = manifest
        self.root = manifest.root
        try:
            self.buffer = torch.empty(manifest.nbytes, dtype=torch.uint8).numpy().data
        except (RuntimeError, MemoryError) as error:
            raise SourceFailed(
                "its state is larger than the memory here", given=f"{manifest.nbytes} bytes"
            ) from error
        self._pending = list(range(manifest.count))
        self._assigned: dict[int, dict[str, float]] = {}
        self._present = bytearray(manifest.count)
        self.done_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is stored."""
        return self.done_bytes == self.manifest.nbytes

    @property
    def unassigned(self) -> int:
        """Number of chunks that are assigned to no donor."""
        return len(self._pending)

    def claim(self, member: str, *, most: int, now: float) -> list[int]:
        """Assign consecutive chunks to a member; empty: there are none."""
        run = self._pending[:1]
        while (
            run
            and len(run) < min(most, len(self._pending))
            and self._pending[len(run)] == run[-1] + 1
        ):
            run.append(self._pending[len(run)])
        del self._pending[: len(run)]
        run = run or self._duplicate(member, now)
        for index in run:
            self._assigned.setdefault(index, {})[member] = now
        return run

    def release(self, member: str) -> None:
        """Make a member's assigned chunks available again."""
        for index, holders in list(self._assigned.items()):
            if holders.pop(member, None) is not None and not holders:
                del self._assigned[index]
                bisect.insort(self._pending, index)

    def check(self, index: int, chunk: memoryview) -> None:
        """Compare a chunk with the manifest; the expensive part.

        Raises:
            SourceCorrupt: it does not match.
        """
        manifest = self.manifest
        if not 0 <= index < manifest.count or chunk.nbytes != manifest.size_of(index):
            raise SourceCorrupt(
                f"a chunk of {manifest.name} has the wrong size",
                given=f"{chunk.nbytes} bytes as chunk {index}",
            )
        if not manifest.fits(index, chunk):
            raise SourceCorrupt(f"a chunk of {manifest.name} is damaged", given=f"chunk {index}")

    def store(self, index: int, chunk: memoryview) -> bool:
        """Store a verified chunk; return whether it is new."""
        self._assigned.pop(index, None)
        if self._present[index]:
            return False
        start = index * self.manifest.chunk_bytes
        self.buffer[start : start + chunk.nbytes] = chunk
        self._present[index] = 1
        self.done_bytes += chunk.nbytes
        return True

    def take_over(self, older: PartialState) -> None:
        """Copy the chunks that are the same in an earlier image, by their digests."""
        shared = min(self.manifest.count, older.manifest.count)
        for index in range(shared):
            same = self.manifest.digest_of(index) == older.manifest.digest_of(index)
            start, nbytes = index * self.manifest.chunk_bytes, self.manifest.size_of(index)
            if same and older._present[index] and older.manifest.size_of(index) == nbytes:
                self.store(index, older.buffer[start : start + nbytes])
        self.restart()

    def restart(self) -> None:
        """Drop all assignments and keep the stored chunks."""
        self._assigned.clear()
        self._pending = [index for index, here in enumerate(self._present) if not here]

    def _duplicate(self, member: str, now: float) -> list[int]:
        """Return a chunk that another member has held for long."""
        for index, holders in list(self._assigned.items()):
            single = len(holders) == 1 and member not in holders
            if single and now - max(holders.values()) > DUPLICATE_AFTER_S:
                return [index]
        return []
