"""A producer and a consumer on a queue of the hub, who remember what they were promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from atoll.errors import AtollError
from atoll.net.http.client import HubClient

QUEUE = "user/letters"
PAUSE_S = 0.05
LEASE_S = 10.0
CLAIM_WAIT_S = 0.5
TRY_S = 3.0
"""How long one call may take; the hub may be away, or frozen."""


class Letters:
    """Sends letters one after another and reads them, in two threads, until they are stopped."""

    def __init__(self, client: Callable[[float], HubClient]) -> None:
        """Get ready.

        Args:
            client: Makes a client with a time limit; each thread has its own.
        """
        self._client = client
        self._sending = threading.Event()
        self._reading = threading.Event()
        self.accepted: set[str] = set()
        """Letters that the hub said it has."""
        self.delivered: dict[str, int] = {}
        """How often each letter was given out."""
        self.done: set[str] = set()
        """Letters that the hub said are done with."""
        self.again: list[str] = []
        """Letters that were given out after that."""
        self.refused: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(work, on), name=name, daemon=True)
            for work, on, name in (
                (self._send, self._sending, "sender"),
                (self._read, self._reading, "reader"),
            )
        ]

    def __enter__(self) -> Self:
        """Start both."""
        self._sending.set()
        self._reading.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_sending()
        self._reading.clear()
        for thread in self._threads:
            thread.join(10 * TRY_S)

    def stop_sending(self) -> None:
        """Send no more; the reader goes on."""
        self._sending.clear()

    def wait_until_read(self, *, timeout_s: float) -> None:
        """Wait until every accepted letter is done, or time is up."""
        deadline = time.monotonic() + timeout_s
        while self.accepted - self.done and time.monotonic() < deadline:
            time.sleep(0.1)

    @property
    def lost(self) -> int:
        """How many promises were broken: letters that vanished, or came back when done."""
        return len(self.accepted - set(self.delivered)) + len(self.again)

    def _run(self, work: Callable[[HubClient, threading.Event], None], on: threading.Event) -> None:
        with self._client(TRY_S) as client:
            while on.is_set():
                work(client, on)

    def _send(self, client: HubClient, on: threading.Event) -> None:
        """Send one letter, as often as it takes."""
        key = f"letter-{len(self.accepted)}"
        while True:
            try:
                client.queue_put(QUEUE, key=key, payload=key.encode())
                break
            except AtollError:
                if not on.is_set():
                    return
                time.sleep(0.2)
        self.accepted.add(key)
        time.sleep(PAUSE_S)

    def _read(self, client: HubClient, on: threading.Event) -> None:
        """Take some letters and say that they are done."""
        try:
            items = client.queue_claim(QUEUE, lease_s=LEASE_S, limit=8, wait_s=CLAIM_WAIT_S)
        except AtollError:
            time.sleep(0.2)
            return
        for item in items:
            if item.payload != item.key.encode():
                self.refused.append(item.key)
            if item.key in self.done:
                self.again.append(item.key)
            self.delivered[item.key] = self.delivered.get(item.key, 0) + 1
            try:
                client.queue_ack(QUEUE, lease=item.lease)
            except AtollError:
                continue  # nothing was promised: it will come again
            self.done.add(item.key)
