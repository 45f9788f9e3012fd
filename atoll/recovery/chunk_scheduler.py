"""Assign chunks to donors: the shared image from all of them, the inner image from one.

Every donor first reports what it has. Shared images of one round must be equal: the image of the
majority is fetched, from the first report on. Donors with another image are dropped, with a reason,
once a majority agrees or all have reported. Nothing counts as complete before that.

Where members have different states by design, and all donors say so, everything is fetched from one
of them and the others are spares.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.clock import RealClock
from atoll.ids import slot_of
from atoll.recovery.partial_state import PartialState
from atoll.recovery.source import SourceCorrupt, SourceDiffers, SourceFailed
from atoll.wire.recovery_messages import MAX_RANGE, StateManifest

AHEAD_S = 0.5
"""A donor is asked for as many chunks as it sends in this time."""

FIRST_CHUNKS = 2
MEASURED_CHUNKS = 4
"""Chunks after which a donor's rate is known well enough to fetch the inner image from it."""

MAX_SOURCES = 4
"""Donors asked at a time, since each copies its state for it; the others are spares."""

CLAIM_S = 45.0
"""A donor that owes chunks and sent none for this long is dropped."""

_POLL_S = 0.1

Progress = Callable[[int, int], None]
"""Called with the bytes fetched and the total; from any thread, must be quick."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The next chunks of one donor."""

    image: PartialState
    indices: list[int]


@dataclass(slots=True)
class _Entry:
    """A donor that has reported."""

    shared: StateManifest
    root: str
    inner: StateManifest
    identical: bool = True
    """Whether its shared image should equal that of other members."""
    delivered: int = 0
    busy_s: float = 0.0
    began: float = 0.0
    """When its current assignment began; 0: it has none."""

    @property
    def rate(self) -> float:
        """Chunks per second; 0 while unknown."""
        return self.delivered / self.busy_s if self.busy_s > 0 else 0.0

    def most(self) -> int:
        """Return the number of chunks to ask for at once."""
        if not self.delivered:
            return FIRST_CHUNKS
        return max(1, min(MAX_RANGE, int(self.rate * AHEAD_S)))


@dataclass(slots=True)
class ChunkScheduler:
    """Shared by the threads of all donors and by the thread that waits for them."""

    waiting: list[str]
    """Donors not asked yet, in the order to ask them."""
    kept: PartialState | None = None
    """Shared image of an earlier attempt; continued if its root is still wanted, else what is equal
    in both is copied."""
    progress: Progress | None = None
    with_inner: bool = True
    """Whether the inner image is fetched, too."""
    finished: bool = field(default=False, init=False)
    shared: PartialState | None = field(default=None, init=False)
    inner: PartialState | None = field(default=None, init=False)
    donors: set[str] = field(default_factory=set, init=False)
    """Donors of at least one chunk."""
    nbytes: int = field(default=0, init=False)
    """Bytes of new chunks."""
    identical: bool = field(default=False, init=False)
    """Whether a donor has said that its shared image should equal that of others."""
    _expected: set[str] = field(default_factory=set, init=False)
    """Donors that were asked and have not reported yet."""
    _entries: dict[str, _Entry] = field(default_factory=dict, init=False)
    _inner_donor: str = field(default="", init=False)
    _settled: bool = field(default=False, init=False)
    _condition: threading.Condition = field(default_factory=threading.Condition, init=False)
    _clock: RealClock = field(default_factory=RealClock, init=False)

    # ------------------------------------------------------------------ threads of sources

    def add_source(
        self, member: str, shared: StateManifest, inner: StateManifest, *, identical: bool = True
    ) -> None:
        """Add a donor's report; `identical`: its shared image should equal that of others."""
        with self._condition:
            self._expected.discard(member)
            self.identical = self.identical or identical
            self._entries[member] = _Entry(shared, shared.root, inner, identical)
            self._choose_image()
            self._check()  # all may be here already, and only have waited for this report
            self._condition.notify_all()

    def claim(self, member: str) -> Assignment | None:
        """Return the next chunks of a donor; wait for them; None: nothing is left.

        Raises:
            SourceFailed: this donor is not wanted.
        """
        with self._condition:
            while not self.finished:
                entry = self._entry(member)
                assignment = self._next(member, entry)
                if assignment is not None:
                    entry.began = self._clock.monotonic()
                    return assignment
                self._condition.wait(_POLL_S)
            return None

    def store_chunk(self, member: str, image: PartialState, index: int, chunk: memoryview) -> None:
        """Verify and store a chunk; not after the end.

        Raises:
            SourceCorrupt: it does not match the manifest.
        """
        image.check(index, chunk)
        with self._condition:
            if self.finished:
                return  # the next attempt may use the image already
            entry = self._entry(member)
            new = image.store(index, chunk)
            now = self._clock.monotonic()
            entry.busy_s += max(0.0, now - entry.began)
            entry.began = now
            entry.delivered += 1
            if new:
                self.nbytes += chunk.nbytes
                if image in (self.shared, self.inner):  # else it was dropped meanwhile
                    self.donors.add(member)
            if image.complete:
                self._check()
            done, total = self._progress_bytes()
        if new and self.progress is not None:
            self.progress(done, total)

    def release_chunks(self, member: str) -> None:
        """End a donor's assignment; its missing chunks may be assigned again."""
        with self._condition:
            entry = self._entries.get(member)
            if entry is not None:
                entry.began = 0.0
            self._release(member)
            self._condition.notify_all()

    def remove_source(self, member: str) -> None:
        """Drop a donor."""
        with self._condition:
            self._expected.discard(member)
            self._entries.pop(member, None)
            self._release(member)
            if member == self._inner_donor:
                if self.inner is not None and not self.inner.complete:
                    self.inner = None
                self._inner_donor = ""
            try:
                self._choose_image()
            except SourceFailed:  # no memory for the state of those that are left
                self._entries.clear()
            self._check()
            self._condition.notify_all()

    # -------------------------------------------------------------------------- the waiter

    def sources_to_start(self) -> list[str]:
        """Return the donors to ask now."""
        with self._condition:
            free = MAX_SOURCES - len(self._entries) - len(self._expected)
            started = self.waiting[: max(0, free)] if not self.finished else []
            del self.waiting[: len(started)]
            self._expected.update(started)
            return started

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, at most `timeout_s`."""
        with self._condition:
            if not self.finished:
                self._condition.wait(timeout_s)

    def stop_waiting_for_sources(self) -> None:
        """Decide on the image with the reports so far."""
        with self._condition:
            if self._entries:
                self._settled = True
                self._check()
                self._condition.notify_all()

    def stop(self) -> None:
        """End the attempt."""
        with self._condition:
            self.finished = True
            self._condition.notify_all()

    def stalled(self) -> list[str]:
        """Return the donors that have not sent their assigned chunks in time."""
        with self._condition:
            now = self._clock.monotonic()
            return [m for m, e in self._entries.items() if e.began and now - e.began > CLAIM_S]

    @property
    def has_sources(self) -> bool:
        """Whether any donor has reported."""
        with self._condition:
            return bool(self._entries)

    @property
    def complete(self) -> bool:
        """Whether the shared image is complete; the inner image may be missing."""
        with self._condition:
            return self._settled and self.shared is not None and self.shared.complete

    # ------------------------------------------------------------------- with the lock held

    def _entry(self, member: str) -> _Entry:
        if member not in self._entries:
            raise SourceFailed("it was already dropped")
        return self._entries[member]

    def _next(self, member: str, entry: _Entry) -> Assignment | None:
        shared = self.shared
        if shared is None or entry.root != shared.root:
            if self._settled and not self._states_differ:
                raise SourceDiffers(
                    "its state differs from that of the other members",
                    given=f"digest {entry.root[:16]}",
                    expected=shared.root[:16] if shared is not None else "",
                )
            return None
        now, most = self._clock.monotonic(), entry.most()
        if self.with_inner and not self._inner_donor and self._suits(entry, shared):
            self._inner_donor = member
            self.inner = PartialState(entry.inner)
        if self.inner is not None and member == self._inner_donor:
            indices = self.inner.claim(member, most=most, now=now)
            if indices:
                return Assignment(self.inner, indices)
        indices = shared.claim(member, most=most, now=now)
        return Assignment(shared, indices) if indices else None

    def _suits(self, entry: _Entry, shared: PartialState) -> bool:
        """Return whether this donor is fast enough for the inner image."""
        if not shared.unassigned:
            return True
        fastest = max(other.rate for other in self._entries.values())
        return entry.delivered >= MEASURED_CHUNKS and entry.rate >= fastest / 2

    @property
    def _states_differ(self) -> bool:
        """Whether members have different states by design; all donors must say so."""
        return not any(entry.identical for entry in self._entries.values())

    def _choose_image(self) -> None:
        """Choose the shared image of most donors; on a tie that of the lowest slot.

        Not after the end: donors that leave then do not change what was fetched.
        """
        if self.finished:
            return
        roots = Counter(entry.root for entry in self._entries.values())
        selected = self.shared.root if self.shared is not None else ""
        if roots and not (self._settled and roots[selected]):
            best = min(self._entries, key=lambda m: (-roots[self._entries[m].root], slot_of(m)))
            if self._entries[best].root != selected:
                self._select(self._entries[best].shared)
        requested = len(self._entries) + len(self._expected)
        if roots and self.shared is not None and 2 * roots[self.shared.root] > requested:
            self._settled = True  # the missing reports cannot change the majority
        elif roots and not self._expected:
            self._settled = True

    def _select(self, manifest: StateManifest) -> None:
        self.inner, self._inner_donor = None, ""
        self.donors.clear()
        if self.kept is not None and self.kept.root == manifest.root:
            self.shared = self.kept
            self.shared.restart()
        else:
            self.shared = PartialState(manifest)
            if self.kept is not None:
                self.shared.take_over(self.kept)

    def _check(self) -> None:
        """End the attempt when all is fetched, or no donor is left."""
        if not self._entries and not self._expected and not self.waiting:
            self.finished = True
        elif self._settled and self.shared is not None and self.shared.complete:
            inner = self.inner is not None and self.inner.complete
            self.finished = inner or not self.with_inner
        if self.finished:
            self._condition.notify_all()

    def _release(self, member: str) -> None:
        if self.finished:
            return  # the next attempt may use the images already, and drops all assignments
        for image in (self.shared, self.inner):
            if image is not None:
                image.release(member)

    def _progress_bytes(self) -> tuple[int, int]:
        """Return bytes fetched and total; the inner image is estimated before it begins."""
        images = [image for image in (self.shared, self.inner) if image is not None]
        total = sum(image.manifest.nbytes for image in images)
        if self.inner is None and self.with_inner:
            total += max(entry.inner.nbytes for entry in self._entries.values())
        return sum(image.done_bytes for image in images), total


def check_manifest(
    manifest: StateManifest, *, job: str, round_: int, base: str, name: str
) -> StateManifest:
    """Return the manifest if it is the requested one.

    Raises:
        SourceCorrupt: it is of another job, round or image.
    """
    actual = (manifest.job, manifest.round, manifest.base, manifest.name)
    if actual != (job, round_, base, name):
        raise SourceCorrupt(
            "its state is not the one that was asked for",
            given=f"{manifest.name[:20]} of job {manifest.job[:80]}, round {manifest.round}",
            expected=f"{name} of job {job}, round {round_}",
        )
    return manifest
