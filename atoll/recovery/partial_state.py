"""One image on its way in: which chunks are here, which are asked for, by whom."""

from __future__ import annotations

import bisect

import torch

from atoll.recovery.source import SourceCorrupt, SourceFailed
from atoll.wire.recovery_messages import StateManifest

DUPLICATE_AFTER_S = 0.5
"""A chunk that was asked for so long ago is asked for elsewhere too, when nothing else is left."""


class PartialState:
    """A buffer that fills up. `check` is called from many threads, all else with a lock held."""

    def __init__(self, manifest: StateManifest) -> None:
        """Take memory for an image.

        Raises:
            SourceFailed: it does not fit this machine.
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
        """Whether every chunk is here."""
        return self.done_bytes == self.manifest.nbytes

    @property
    def unassigned(self) -> int:
        """Chunks that nobody was asked for."""
        return len(self._pending)

    def claim(self, member: str, *, most: int, now: float) -> list[int]:
        """Return chunks that follow each other for a member to fetch; empty: there are none."""
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
        """A member fetches nothing any more: what it had claimed is free again."""
        for index, holders in list(self._assigned.items()):
            if holders.pop(member, None) is not None and not holders:
                del self._assigned[index]
                bisect.insort(self._pending, index)

    def check(self, index: int, chunk: memoryview) -> None:
        """Compare a chunk with the manifest; this is what takes time.

        Raises:
            SourceLied: it is not what the manifest says.
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
        """Keep a chunk that was checked; return whether it is new."""
        self._assigned.pop(index, None)
        if self._present[index]:
            return False
        start = index * self.manifest.chunk_bytes
        self.buffer[start : start + chunk.nbytes] = chunk
        self._present[index] = 1
        self.done_bytes += chunk.nbytes
        return True

    def restart(self) -> None:
        """Forget who was asked for what; the chunks that are here stay."""
        self._assigned.clear()
        self._pending = [index for index, here in enumerate(self._present) if not here]

    def _duplicate(self, member: str, now: float) -> list[int]:
        """Return one chunk that another member has been busy with for long."""
        for index, holders in list(self._assigned.items()):
            single = len(holders) == 1 and member not in holders
            if single and now - max(holders.values()) > DUPLICATE_AFTER_S:
                return [index]
        return []
