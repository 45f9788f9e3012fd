"""What a member runs so that others can take its committed state, while it trains on."""

from __future__ import annotations

import logging
import secrets
from types import TracebackType
from typing import Self

from atoll.net.sync_link import SyncLink
from atoll.recovery.http_server import HttpStateServer
from atoll.recovery.relay_server import RelayStateServer
from atoll.recovery.snapshot_cache import SnapshotCache, StateOf, Still

log = logging.getLogger(__name__)


class StateServer:
    """Gives the committed state to members of the job, directly and through the hub.

    Training is held up only while an image is copied, see :mod:`atoll.recovery.snapshot_cache`. A
    direct asker brings a key that this member tells through the hub to members of its job only, or
    the job's token.
    """

    def __init__(self, *, job: str, token: str, address: str, link: SyncLink | None) -> None:
        """Listen; until `offer` every ask is answered "not yet".

        Args:
            job: The job's id.
            token: Own token of the job.
            address: This machine's address as it is used towards the hub; empty: be reached
                through the hub only.
            link: The member's session with the hub; None: be reached directly only.
        """
        key = secrets.token_urlsafe(24)
        self._cache = SnapshotCache(job=job, key=key)
        self._http_server: HttpStateServer | None = None
        self.dial: list[str] = []
        """host:port where it listens; empty: nowhere."""
        if address:
            try:
                self._http_server = HttpStateServer(
                    self._cache.answer, address=address, keys=(key, token)
                )
                host = f"[{address}]" if ":" in address else address
                self.dial = [f"{host}:{self._http_server.port}"]
            except OSError as error:
                log.warning("the state is given through the hub only: %s: %s", address, error)
        self._relay_server = (
            RelayStateServer(self._cache.answer, link=link) if link is not None else None
        )

    def offer(self, state: StateOf, *, still: Still) -> None:
        """Give this state to whoever asks, from now on.

        Args:
            state: Looked at inside `still` only, whenever somebody asks.
            still: `Gate.still` of the task.
        """
        self._cache.offer(state, still=still)

    @property
    def rounds(self) -> list[int]:
        """Rounds whose images are in memory now."""
        return self._cache.rounds

    def close(self) -> None:
        """Stop listening and drop all images. Calling it again does nothing."""
        self._cache.close()
        if self._relay_server is not None:
            self._relay_server.close()
            self._relay_server = None
        if self._http_server is not None:
            self._http_server.close()
            self._http_server = None

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
