"""Transport of queues to the hub: messages over the session, large payloads as blobs over HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from atoll.net.http.client import HubClient
from atoll.net.sync_link import SyncLink
from atoll.queues.serialization import Parts
from atoll.wire.messages import Message

SCRATCH_PREFIX = "atoll-payload-"


class Channel(Protocol):
    """Sends requests of queues and topics, and stores large payloads."""

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        """Return the answer to a request.

        Raises:
            DeadlineExceeded: there was no answer in time.
            AtollError: the request failed.
        """
        ...

    def ask_later(self, body: Message, *, timeout_s: float) -> concurrent.futures.Future[Message]:
        """Send a request in the background; the future has what `ask` returns or raises."""
        ...

    def put_large(self, parts: Parts) -> tuple[str, int]:
        """Store a large payload for one item; return its SHA-256 and size."""
        ...

    def release_large(self, sha256: str) -> None:
        """Release a payload after the put of its item has failed."""
        ...

    def large(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        """Return a context in which a large payload is available as a file."""
        ...

    def close(self) -> None:
        """Close the resources it has opened itself."""
        ...


class HubChannel:
    """A member's channel: its session, and a client for blobs that is opened when needed.

    Args:
        link: The session; its opener closes it.
        client: Opens a client of the hub.
        scratch: Folder for payloads in transit.
    """

    def __init__(self, link: SyncLink, *, client: Callable[[], HubClient], scratch: Path) -> None:
        self._link = link
        self._open_client = client
        self._client: HubClient | None = None
        self._lock = threading.Lock()
        """A client is for one thread at a time."""
        self._scratch = scratch

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        """Return the hub's answer; survives reconnects and restarts of the hub."""
        return self._link.request(body, timeout_s=timeout_s)

    def ask_later(self, body: Message, *, timeout_s: float) -> concurrent.futures.Future[Message]:
        """Ask the hub in the background."""
        return self._link.request_later(body, timeout_s=timeout_s)

    def put_large(self, parts: Parts) -> tuple[str, int]:
        """Send a payload as a blob, block by block."""
        with self._file() as path:
            with path.open("wb") as file:
                nbytes = sum(file.write(part) for part in parts)
            with self._lock:
                return self._opened().put_blob(path), nbytes

    def release_large(self, sha256: str) -> None:
        """Do nothing: the hub deletes blobs that no item refers to."""

    @contextlib.contextmanager
    def large(self, sha256: str) -> Iterator[Path]:
        """Fetch a blob, block by block."""
        with self._file() as path:
            with self._lock:
                self._opened().get_blob(sha256, path)
            yield path

    def close(self) -> None:
        """Close the client of blobs, but not the session."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _opened(self) -> HubClient:
        if self._client is None:
            self._client = self._open_client()
        return self._client

    @contextlib.contextmanager
    def _file(self) -> Iterator[Path]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=SCRATCH_PREFIX, dir=self._scratch, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder) / "payload"
