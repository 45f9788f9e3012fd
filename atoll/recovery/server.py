"""Serve this member's committed state to others while it trains."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

from atoll.net.line_use import LineUse
from atoll.net.member_tls import MemberKey, server_context
from atoll.net.sync_link import SyncLink
from atoll.recovery.http_server import HttpStateServer
from atoll.recovery.relay_server import RelayStateServer
from atoll.recovery.snapshot_cache import Offered, SnapshotCache, StateOf, Still
from atoll.wire.recovery_messages import StateAnswer, StateAsk

log = logging.getLogger(__name__)

SERVE_S = 1.0
"""How long the line counts as in use after an answer: a slow line sends one in this time."""


class StateServer:
    """Serves the committed state to members of the job, directly and over the relay.

    Training pauses only while an image is copied, see :mod:`atoll.recovery.snapshot_cache`. A
    direct connection needs the key, which is sent to members of the job only, or the job's token.
    """

    def __init__(
        self, *, job: str, token: str, address: str, link: SyncLink | None, encrypted: bool = True,
        line: LineUse | None = None,
    ) -> None:  # fmt: skip
        """Start listening; before `offer` requests are answered with "not yet".

        Args:
            job: The job's id.
            token: Token of the job.
            address: This machine's address towards the hub; empty: serve over the relay only.
            link: The member's session with the hub; None: serve directly only.
            encrypted: Whether direct connections are encrypted: `encryption` in `[job]`.
            line: Marked as in use while the state is sent.
        """
        key = secrets.token_urlsafe(24)
        own = MemberKey() if encrypted and address else None
        self.fingerprint = own.fingerprint if own is not None else ""
        """SHA-256 of the key of its certificate; empty: it does not encrypt."""
        self._cache = SnapshotCache(job=job, key=key, fingerprint=self.fingerprint)
        self._line = line or LineUse()
        self._http_server: HttpStateServer | None = None
        self.dial: list[str] = []
        """host:port of the HTTP server; empty without one."""
        if address:
            try:
                self._http_server = HttpStateServer(
                    self._answer, address=address, keys=(key, token),
                    tls=server_context(own) if own is not None else None,
                )  # fmt: skip
                host = f"[{address}]" if ":" in address else address
                self.dial = [f"{host}:{self._http_server.port}"]
            except OSError as error:
                log.warning("the state is served through the hub only: %s: %s", address, error)
        self._relay_server = RelayStateServer(self._answer, link=link) if link is not None else None

    def _answer(self, ask: StateAsk) -> tuple[StateAnswer, memoryview]:
        answer, view = self._cache.answer(ask)
        if view.nbytes:
            self._line.serve(SERVE_S)
        return answer, view

    def offer(self, state: StateOf, *, still: Still) -> None:
        """Serve this state from now on.

        Args:
            state: Read inside `still` only.
            still: `StateLock.still` of the task.
        """
        self._cache.offer(state, still=still)

    def offer_several(self, find: Callable[[int], StateOf], *, still: Still, images: int) -> None:
        """Serve several states from now on, e.g. of modules; each has a number of its own.

        Args:
            find: Returns the state with a number, whose `round` is that number if it is held;
                read inside `still` only.
            still: `StateLock.still` of the task.
            images: Copies that are in memory at the same time, at most.
        """
        self._cache.serve(Offered(find, still, images=images, ordered=False))

    @property
    def rounds(self) -> list[int]:
        """Rounds with images in memory."""
        return self._cache.rounds

    def close(self) -> None:
        """Stop listening and drop all images. Idempotent."""
        self._cache.close()
        if self._relay_server is not None:
            self._relay_server.close()
            self._relay_server = None
        if self._http_server is not None:
            self._http_server.close()
            self._http_server = None

    def __enter__(self) -> Self:
        """Return the server; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
