"""One image on its way in: which chunks are here, which are asked for, by whom."""

from __future__ import annotations

import bisect

import torch

from atoll.recovery.source import SourceCorrupt, SourceFailed
from atoll.wire.recovery_messages import StateManifest

STEAL_AFTER_S = 0.5
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
        self._todo = list(range(manifest.count))
        self._asked: dict[int, dict[str, float]] = {}
        self._have = bytearray(manifest.count)
        self.done_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return self.done_bytes == self.manifest.nbytes

    @property
    def untouched(self) -> int:
        """Chunks that nobody was asked for."""
        return len(self._todo)

    def claim(self, member: str, *, most: int, now: float) -> list[int]:
        """Return chunks that follow each other for a member to fetch; empty: there are none."""
        run = self._todo[:1]
        while run and len(run) < min(most, len(self._todo)) and self._todo[len(run)] == run[-1] + 1:
            run.append(self._todo[len(run)])
        del self._todo[: len(run)]
        run = run or self._stolen(member, now)
        for index in run:
            self._asked.setdefault(index, {})[member] = now
        return run

    def give_back(self, member: str) -> None:
        """A member fetches nothing any more: what it had claimed is free again."""
        for index, holders in list(self._asked.items()):
            if holders.pop(member, None) is not None and not holders:
                del self._asked[index]
                bisect.insort(self._todo, index)

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
        self._asked.pop(index, None)
        if self._have[index]:
            return False
        start = index * self.manifest.chunk_bytes
        self.buffer[start : start + chunk.nbytes] = chunk
        self._have[index] = 1
        self.done_bytes += chunk.nbytes
        return True

    def begin_again(self) -> None:
        """Forget who was asked for what; the chunks that are here stay."""
        self._asked.clear()
        self._todo = [index for index, here in enumerate(self._have) if not here]

    def _stolen(self, member: str, now: float) -> list[int]:
        """Return one chunk that another member has been busy with for long."""
        for index, holders in list(self._asked.items()):
            single = len(holders) == 1 and member not in holders
            if single and now - max(holders.values()) > STEAL_AFTER_S:
                return [index]
        return []
