"""The session with one donor: offer and manifests, then chunks, directly or over the relay."""

from __future__ import annotations

import time
from collections.abc import Sequence

from atoll.clock import RealClock
from atoll.errors import WireError
from atoll.ids import session_id
from atoll.net.sync_link import SyncLink
from atoll.recovery.chunk_scheduler import ChunkScheduler, check_manifest
from atoll.recovery.direct_source import DirectSource
from atoll.recovery.relay_source import RelaySource
from atoll.recovery.source import (
    ConnectionBroken,
    Source,
    SourceAdvanced,
    SourceCorrupt,
    SourceFailed,
    donor_refused,
)
from atoll.wire import messages
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.recovery_messages import (
    GONE,
    INNER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_RANGE,
    OFFER,
    OK,
    SHARED,
    WAIT,
    ImageOffer,
    StateAnswer,
    StateAsk,
    StateManifest,
    count_chunks,
    decode_state_manifest,
)

READY_S = 90.0
"""Longest wait for a donor that is in the middle of an optimizer step."""

BEHIND_S = 10.0
"""Longest wait for a donor that does not know the committed round yet."""

_POLL_S = 0.03
_MAX_POLL_S = 0.5
_BREAKS = 3
"""Broken direct connections after which only the relay is used."""


class DonorSession:
    """The session with one donor; `run` has its own thread."""

    def __init__(
        self,
        link: SyncLink,
        peer: messages.Source,
        *,
        job: str,
        round_: int,
        scheduler: ChunkScheduler,
    ) -> None:
        """Prepare to ask `peer` for the state of a round."""
        self.member = peer.member
        self._job, self._round, self._scheduler = job, round_, scheduler
        self._relay = RelaySource(link, address=session_id(job, peer.member))
        self._direct: DirectSource | None = None
        self._clock = RealClock()
        self._key = self._fingerprint = ""
        self._dials = list(peer.state[:4])
        self._breaks = 0
        self._closed = False

    def run(self) -> None:
        """Fetch what the scheduler assigns until it has finished.

        Raises:
            SourceFailed: this donor cannot be used; says why.
            SourceAdvanced: it is on another round.
        """
        member = self.member
        try:
            offer = self._offer()
            self._key, self._fingerprint = offer.key, offer.fingerprint
            self._connect()
            shared, inner = (self._manifest(offer, name) for name in (SHARED, INNER))
            self._scheduler.add_source(member, shared, inner, identical=offer.identical)
            while (assignment := self._scheduler.claim(member)) is not None:
                try:
                    image = assignment.image
                    self._source.fetch(
                        self._round,
                        image.manifest.name,
                        assignment.indices,
                        lambda index, chunk, image=image: self._scheduler.store_chunk(  # type: ignore[misc]
                            member, image, index, chunk
                        ),
                    )
                except ConnectionBroken:
                    self._reconnect()
                finally:
                    self._scheduler.release_chunks(member)
        finally:
            self._relay.close()
            if self._direct is not None:
                self._direct.release()

    def close(self) -> None:
        """End all waits; called from another thread."""
        self._closed = True
        self._relay.close()
        if self._direct is not None:
            self._direct.close()

    @property
    def _source(self) -> Source:
        return self._direct if self._direct is not None else self._relay

    # --------------------------------------------------------------------------- beginning

    def _offer(self) -> StateAnswer:
        """Return the donor's offer; wait while it prepares."""
        began, pause_s = self._clock.monotonic(), _POLL_S
        while True:
            answer, _ = self._relay.ask(StateAsk(0, OFFER, self._round))
            waited_s = self._clock.monotonic() - began
            if answer.status == OK:
                return answer
            if answer.status == GONE:
                if answer.round > self._round or waited_s > BEHIND_S:
                    raise SourceAdvanced(answer.round)
            elif answer.status != WAIT:
                raise donor_refused(answer)
            if waited_s > READY_S or self._closed:
                raise SourceFailed("its state was not ready in time", given=f"{waited_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(_MAX_POLL_S, pause_s * 1.5)

    def _connect(self) -> None:
        """Dial the donor; without an answer use the relay."""
        self._direct = None
        for dial in self._dials:
            try:
                self._direct = DirectSource(dial, key=self._key, fingerprint=self._fingerprint)
            except ConnectionBroken:
                continue
            if self._closed:
                self._direct.close()
            return

    def _reconnect(self) -> None:
        """Dial again after a break, a few times."""
        if self._direct is not None:
            self._direct.release()
        self._breaks += 1
        if self._breaks >= _BREAKS:
            self._dials = []
        self._connect()

    def _manifest(self, offer: StateAnswer, name: str) -> StateManifest:
        """Return the manifest of one image, checked against offer and request."""
        listed = next((image for image in offer.images if image.name == name), None)
        if listed is None or not 0 < listed.manifest_bytes <= MAX_MANIFEST_BYTES:
            raise SourceCorrupt(
                "its offer is incomplete", given=f"no {name}, or too large a manifest"
            )
        try:
            manifest = decode_state_manifest(self._read(listed))
        except ConnectionBroken:
            self._reconnect()
            return self._manifest(offer, name)
        except WireError as error:
            raise SourceCorrupt("its manifest is malformed", given=error.message()[:300]) from error
        if manifest.root != listed.root or manifest.nbytes != listed.nbytes:
            raise SourceCorrupt("its manifest is not the one it offered", given=name)
        return check_manifest(
            manifest, job=self._job, round_=self._round, base=offer.base, name=name
        )

    def _read(self, listed: ImageOffer) -> bytes:
        """Return the bytes of a manifest."""
        data = bytearray()
        step = MAX_RANGE if self._direct is not None else 1
        for first in range(0, count_chunks(listed.manifest_bytes), step):
            answer, body = self._source.ask(
                StateAsk(0, MANIFEST, self._round, listed.name, first, step)
            )
            if answer.status in (GONE, WAIT):
                raise SourceAdvanced(answer.round)
            if answer.status != OK:
                raise donor_refused(answer)
            data += body
            if len(data) > listed.manifest_bytes or len(body) > step * CHUNK_BYTES:
                raise SourceCorrupt("its manifest is longer than it said", given=listed.name)
        return bytes(data)


def ask_order(peers: Sequence[messages.Source], *, me: int) -> list[str]:
    """Return the order in which to ask; newcomers start at different members."""
    members = [peer.member for peer in peers]
    start = me % len(members) if members else 0
    return members[start:] + members[:start]
