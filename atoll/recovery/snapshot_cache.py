"""A donor's images of its committed state: made on request and shared by all requests.

The training thread pauses for one copy into prepared memory only: sizes and memory are prepared
before, digests are computed after. Images of at most two rounds are kept, each until `IDLE_S` after
the last request. A member with several modules serves each by a number of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.checkpoint.format.memory_image import MemoryImage, image_nbytes
from atoll.checkpoint.format.part import Part
from atoll.clock import RealClock
from atoll.errors import AtollError, DeadlineExceeded
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.recovery_messages import (
    CHUNK,
    GONE,
    INNER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_RANGE,
    OFFER,
    OK,
    REFUSED,
    SHARED,
    WAIT,
    ImageOffer,
    StateAnswer,
    StateAsk,
    encode_state_manifest,
    state_manifest,
)

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""An image without requests for this long is dropped."""

MAX_ROUNDS = 2
STILL_S = 60.0
"""Longest wait for the state to rest: one optimizer step of a slow machine."""

FRESH_S = 0.2
"""How long a check that the donor is still at the same round stays valid."""

_OUTCOME_S = 5.0
_MAX_REQUESTED = 8
_SWEEP_S = 1.0
_NOTHING = memoryview(b"")


class StateOf(Protocol):
    """A member's committed state; read only inside `still`."""

    @property
    def round(self) -> int:
        """Rounds committed."""
        ...

    @property
    def base(self) -> str:
        """Digest of the committed state."""
        ...

    @property
    def identical(self) -> bool:
        """Whether the shared part is equal on all members at the same round."""
        ...

    def parts(self) -> tuple[Part, Part]:
        """Return the shared part and the inner part; the tensors are copied afterwards."""
        ...


Still = Callable[..., AbstractContextManager[None]]
"""`StateLock.still`: called with `timeout_s`; the state does not change inside the block."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What a member serves: one state, or the states of several modules."""

    find: Callable[[int], StateOf]
    """Returns the state with a number; read only inside `still`."""
    still: Still
    images: int = MAX_ROUNDS
    """How many numbers may have images in memory at the same time."""
    ordered: bool = True
    """Numbers are rounds of one state: if it goes back, images of later rounds are dropped."""


@dataclass(frozen=True, slots=True)
class _HeldSnapshot:
    """One image and its manifest."""

    view: memoryview
    manifest: memoryview
    offer: ImageOffer


@dataclass(slots=True)
class _CachedSnapshot:
    """The images of one round."""

    base: str
    identical: bool
    images: dict[str, _HeldSnapshot]
    used: float
    """Monotonic time of the last request."""
    seen: float
    """When the donor was last known to be at this round or a later one."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Why there are no images of a round."""

    status: str
    current_round: int
    reason: str
    at: float


class SnapshotCache:
    """Answers requests from any thread without waiting for training."""

    def __init__(
        self, *, job: str, key: str = "", fingerprint: str = "", idle_s: float = IDLE_S
    ) -> None:
        """Start the thread that makes images; it sleeps until a request arrives.

        Args:
            job: The job of the state; part of every manifest.
            key: Access key of the donor's port, sent with every offer.
            fingerprint: Of the key of that port's certificate, sent too; empty: no TLS.
            idle_s: See `IDLE_S`.
        """
        self._job, self._key, self._idle_s = job, key, idle_s
        self._fingerprint = fingerprint
        self._clock = RealClock()
        self._condition = threading.Condition()
        self._offered: Offered | None = None
        self._rounds: dict[int, _CachedSnapshot] = {}
        self._requested: list[int] = []
        self._outcomes: dict[int, _Outcome] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="state-images", daemon=True)
        self._thread.start()

    def offer(self, state: StateOf, *, still: Still) -> None:
        """Serve this state from now on; images of another one are dropped."""
        self.serve(Offered(lambda round_: state, still))

    def serve(self, offered: Offered) -> None:
        """Serve these states from now on; images of others are dropped."""
        with self._condition:
            self._offered = offered
            self._rounds.clear()
            self._outcomes.clear()

    def close(self) -> None:
        """Drop all images and refuse later requests."""
        with self._condition:
            self._closed = True
            self._offered = None
            self._rounds.clear()
            self._condition.notify_all()

    @property
    def rounds(self) -> list[int]:
        """Rounds with images in memory."""
        with self._condition:
            return sorted(self._rounds)

    # ------------------------------------------------------------------------ answering

    def answer(self, ask: StateAsk) -> tuple[StateAnswer, memoryview]:
        """Return the answer to a request immediately; its bytes are views into the images."""
        with self._condition:
            cached = self._rounds.get(ask.round)
            if cached is None:
                return self._answer_without_images(ask), _NOTHING
            cached.used = now = self._clock.monotonic()
            if ask.kind == OFFER and now - cached.seen > FRESH_S:
                self._request(ask.round)
        if ask.kind == OFFER:
            offers = [snapshot.offer for snapshot in cached.images.values()]
            answer = StateAnswer(
                ask.number, OK, ask.round, base=cached.base, key=self._key, images=offers,
                identical=cached.identical, fingerprint=self._fingerprint,
            )  # fmt: skip
            return answer, _NOTHING
        snapshot = cached.images.get(ask.image)
        if snapshot is None or ask.kind not in (MANIFEST, CHUNK):
            return self._refusal(
                ask, f"there is no {ask.kind[:20]} of {ask.image[:20]!r}"
            ), _NOTHING
        whole = snapshot.view if ask.kind == CHUNK else snapshot.manifest
        start = ask.first * CHUNK_BYTES
        if not (0 <= start < whole.nbytes and 0 < ask.count <= MAX_RANGE):
            reason = f"chunks {ask.first} to {ask.first + ask.count} of {whole.nbytes} bytes"
            return self._refusal(ask, reason), _NOTHING
        answer = StateAnswer(ask.number, OK, ask.round, image=ask.image, index=ask.first)
        return answer, whole[start : start + ask.count * CHUNK_BYTES]

    def _answer_without_images(self, ask: StateAsk) -> StateAnswer:
        """Answer a request for a round that is not in memory, and have its images made."""
        if self._closed:
            return StateAnswer(ask.number, REFUSED, -1, reason="this member is leaving")
        if self._offered is None:
            return StateAnswer(ask.number, GONE, -1, reason="this member has no state yet")
        outcome = self._outcomes.get(ask.round)
        age_s = self._clock.monotonic() - outcome.at if outcome is not None else _OUTCOME_S
        if age_s > FRESH_S:
            self._request(ask.round)
        if outcome is None or age_s >= _OUTCOME_S:
            return StateAnswer(ask.number, WAIT, ask.round)
        return StateAnswer(ask.number, outcome.status, outcome.current_round, reason=outcome.reason)

    def _request(self, round_: int) -> None:
        """Have the thread check the state; call it with the lock held."""
        if round_ not in self._requested and len(self._requested) < _MAX_REQUESTED:
            self._requested.append(round_)
            self._condition.notify_all()

    def _refusal(self, ask: StateAsk, reason: str) -> StateAnswer:
        return StateAnswer(ask.number, REFUSED, ask.round, reason=reason)

    # --------------------------------------------------------------------------- making

    def _run(self) -> None:
        """Make requested images and drop idle ones, until closed."""
        while True:
            with self._condition:
                if not self._requested and not self._closed:
                    self._condition.wait(_SWEEP_S if self._rounds or self._outcomes else None)
                if self._closed:
                    return
                self._sweep()
                offered, requested = self._offered, self._requested[:1]
            if requested and offered is not None:
                self._prepare(requested[0], offered)
            with self._condition:
                self._requested = [round_ for round_ in self._requested if round_ not in requested]

    def _prepare(self, round_: int, offered: Offered) -> None:
        """Make the images of a round, or record why there are none."""
        status, current_round, reason = REFUSED, round_, ""
        try:
            current_round = self._copy_state(round_, offered)
            status = GONE
        except DeadlineExceeded:
            status = WAIT  # a very long step; members that still need the state ask again
        except AtollError as error:
            reason = error.message()[:300]
            log.warning("the state cannot be served to others: %s", error)
        except Exception as error:  # the state may run user code
            reason = f"{type(error).__name__}: {error}"[:300]
            log.exception("the state cannot be served to others")
        with self._condition:
            if self._offered is offered and round_ not in self._rounds:
                now = self._clock.monotonic()
                self._outcomes[round_] = _Outcome(status, current_round, reason, now)

    def _copy_state(self, round_: int, offered: Offered) -> int:
        """Copy the state if it is at the round; return the round it is at."""
        with offered.still(timeout_s=STILL_S):
            state = offered.find(round_)
            current_round = state.round
            if current_round != round_ or self._is_current(current_round, state):
                if offered.ordered:
                    self._drop_later_rounds(current_round)
                return current_round
            sizes = [image_nbytes(part) for part in state.parts()]
        self._make_room(offered.images)
        # Copying into untouched pages takes eight times as long, and training waits for the copy:
        # touch them before.
        buffers = [torch.empty(size, dtype=torch.uint8).zero_().numpy().data for size in sizes]
        with offered.still(timeout_s=STILL_S):
            state = offered.find(round_)
            current_round, base = state.round, state.base
            if current_round != round_:
                return current_round
            images = [
                MemoryImage(part, buffer=buffer if buffer.nbytes >= image_nbytes(part) else None)
                for part, buffer in zip(state.parts(), buffers, strict=True)
            ]
        snapshot = {
            name: self._make_snapshot(image.view, round_, base, name)
            for name, image in zip((SHARED, INNER), images, strict=True)
        }
        with self._condition:
            if self._offered is offered:
                now = self._clock.monotonic()
                self._rounds[round_] = _CachedSnapshot(base, state.identical, snapshot, now, now)
                self._outcomes.pop(round_, None)
        return current_round

    def _is_current(self, current_round: int, state: StateOf) -> bool:
        """Return whether there are images of the donor's present state.

        A run that was reset to a checkpoint reaches the same rounds again with other states.
        """
        with self._condition:
            cached = self._rounds.get(current_round)
        if cached is None:
            return False
        if cached.base == state.base:
            cached.seen = self._clock.monotonic()
            return True
        with self._condition:
            self._rounds.pop(current_round, None)
        return False

    def _drop_later_rounds(self, current_round: int) -> None:
        """Drop the images of rounds that the donor no longer has after a reset."""
        with self._condition:
            self._rounds = {r: s for r, s in self._rounds.items() if r <= current_round}

    def _make_snapshot(self, view: memoryview, round_: int, base: str, name: str) -> _HeldSnapshot:
        manifest = state_manifest(view, job=self._job, round_=round_, base=base, name=name)
        encoded = encode_state_manifest(manifest)
        if len(encoded) > MAX_MANIFEST_BYTES:
            raise AtollError(
                "the state is too large to be served to others",
                given=f"{view.nbytes} bytes of {name}",
                expected=f"a manifest of at most {MAX_MANIFEST_BYTES} bytes",
                remedy="newcomers start from a checkpoint",
            )
        offer = ImageOffer(name, view.nbytes, manifest.root, len(encoded))
        return _HeldSnapshot(view, memoryview(encoded), offer)

    def _make_room(self, images: int) -> None:
        """Drop the least recently requested round, if there are as many as allowed."""
        with self._condition:
            while len(self._rounds) >= images:
                del self._rounds[min(self._rounds, key=lambda r: self._rounds[r].used)]

    def _sweep(self) -> None:
        """Drop images without recent requests; call it with the lock held."""
        now = self._clock.monotonic()
        self._rounds = {r: s for r, s in self._rounds.items() if now - s.used < self._idle_s}
        self._outcomes = {r: o for r, o in self._outcomes.items() if now - o.at < _OUTCOME_S}
