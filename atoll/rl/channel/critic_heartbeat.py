"""The critic's heartbeat: informs actors that it is alive, and how far it has read each of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from atoll.errors import AtollError
from atoll.rl.channel.latest import Background
from atoll.rl.channel.names import (
    BEAT_S,
    EXTEND_S,
    LEASE_S,
    LEAST_BEAT_GAP_S,
    QueueNames,
    QueueProvider,
)


class CriticHeartbeat:
    """Publishes the heartbeat in the background, at least once a second.

    `beats` returns the last number taken of each actor; `every` runs every few seconds.
    """

    def __init__(
        self,
        provider: QueueProvider,
        names: QueueNames,
        *,
        beats: Callable[[], dict[str, int]],
        every: Callable[[], None],
    ) -> None:
        self.version = 0
        """Number of updates, sent with each heartbeat."""
        self._topic = provider.topic(names.heartbeat, max_items=1)
        self._beats, self._every = beats, every
        self._news = threading.Event()
        self._began = time.monotonic()
        self._extended_at = self._began
        last = self._topic.subscribe("critic", start="oldest").newest()
        before = last.value if last is not None else {}
        self._owed = bool(before) and (not before.get("closed") or bool(before.get("owed")))
        # First of all: the successor of a critic that dies must know that it held leases.
        self._topic.publish(self._message(), timeout_s=10.0)
        self._thread = Background("heartbeat of the critic", self._beat)

    @property
    def may_be_owed(self) -> bool:
        """Whether leases of a dead critic may still hold experience back."""
        return self._owed and time.monotonic() - self._began < LEASE_S + 2.0

    def soon(self) -> None:
        """Publish soon: actors may wait for the new numbers."""
        self._news.set()

    def close(self, *, owed: bool) -> None:
        """Announce the critic's end; `owed`: it holds experience that it could not settle."""
        self._thread.end()
        self._news.set()
        self._thread.close()
        with contextlib.suppress(AtollError):  # no heartbeat means the same
            self._topic.publish({**self._message(), "closed": True, "owed": owed}, timeout_s=5.0)

    def _beat(self) -> None:
        self._news.wait(BEAT_S)
        self._news.clear()
        self._topic.publish(self._message(), timeout_s=10.0)
        if time.monotonic() - self._extended_at >= EXTEND_S:
            self._extended_at = time.monotonic()
            self._every()
        time.sleep(LEAST_BEAT_GAP_S)

    def _message(self) -> dict[str, object]:
        return {"format": 1, "version": self.version, "taken": self._beats()}
