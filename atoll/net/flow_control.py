"""Flow control of a link: credit for relayed bytes, and pausing the reader.

The hub holds at most one window of bytes per pair of sender and receiver, and returns credit when
they have left it. Counts belong to one connection; the next one starts with full windows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator

from atoll.errors import AtollError, FrameTooLarge, PeerLost


class _Waiter:
    __slots__ = ("future", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class CreditWindow:
    """Credit of one session. Waiters of one receiver are served in order."""

    def __init__(self) -> None:
        self._window_bytes = 0
        self._owed: dict[str, int] = {}
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._losses: dict[str, int] = {}
        self._failure: AtollError | None = None
        self.generation = 0
        """Number of the connection to which the counts belong; 0 without a connection."""

    def open(self, window_bytes: int, *, generation: int) -> None:
        """Start with full windows on a new connection."""
        self._window_bytes = window_bytes
        self._owed.clear()
        self.generation = generation
        for to in list(self._waiting):
            self._serve(to)

    def shut(self) -> None:
        """Stop sending until the next connection is open."""
        self.generation = 0
        self._owed.clear()

    def fail(self, error: AtollError) -> None:
        """Raise the error in all current and later waiters."""
        self._failure = error
        self.generation = 0
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(error)
        self._waiting.clear()

    async def acquire(self, to: str, nbytes: int) -> int:
        """Wait until `nbytes` may be sent to `to`; return the generation that they count for.

        Raises:
            PeerLost: the hub reported that `to` is not connected.
            FrameTooLarge: they exceed the window.
        """
        if self._failure is not None:
            raise self._failure
        if self.generation and nbytes > self._window_bytes:
            raise FrameTooLarge(
                "this relay frame is larger than the hub's window",
                given=f"{nbytes} bytes",
                expected=f"at most {self._window_bytes} bytes",
            )
        if not self._waiting.get(to) and self._fits(to, nbytes):
            self._book(to, nbytes)
            return self.generation
        waiter = _Waiter(nbytes)
        self._waiting.setdefault(to, deque()).append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            future = waiter.future  # it may have been served before the cancellation arrived
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(to, nbytes, generation=future.result())
            raise
        finally:
            self._leave(to, waiter)

    def release(self, to: str, nbytes: int, *, generation: int) -> None:
        """Return credit for bytes that the hub forwarded or that were never sent."""
        if generation != self.generation:  # of an earlier connection: its counts are reset
            return
        left = self._owed.get(to, 0) - nbytes
        if left > 0:
            self._owed[to] = left
        else:
            self._owed.pop(to, None)
        self._serve(to)

    def receiver_lost(self, to: str) -> None:
        """Raise PeerLost in the waiters of a receiver that is not connected."""
        self._losses[to] = self._losses.get(to, 0) + 1
        for waiter in self._waiting.pop(to, ()):
            if not waiter.future.done():
                waiter.future.set_exception(peer_lost(to))

    def losses(self, to: str) -> int:
        """Return how often the hub reported that `to` is not connected."""
        return self._losses.get(to, 0)

    def owed_bytes(self, to: str) -> int:
        """Return the uncredited bytes to `to`."""
        return self._owed.get(to, 0)

    def _fits(self, to: str, nbytes: int) -> bool:
        return self.generation > 0 and self._owed.get(to, 0) + nbytes <= self._window_bytes

    def _book(self, to: str, nbytes: int) -> None:
        self._owed[to] = self._owed.get(to, 0) + nbytes

    def _serve(self, to: str) -> None:
        waiters = self._waiting.get(to)
        while waiters and (waiters[0].future.done() or self._fits(to, waiters[0].nbytes)):
            waiter = waiters.popleft()
            if not waiter.future.done():
                self._book(to, waiter.nbytes)
                waiter.future.set_result(self.generation)

    def _leave(self, to: str, waiter: _Waiter) -> None:
        waiters = self._waiting.get(to)
        if waiters is not None:
            if waiter in waiters:
                waiters.remove(waiter)
                self._serve(to)  # the next waiter may want fewer bytes
            if not waiters:
                self._waiting.pop(to, None)


def peer_lost(to: str) -> PeerLost:
    """Return the error for a receiver that is not connected to the hub."""
    return PeerLost(
        "the receiver of relayed tensors is gone",
        given=to,
        expected="a process that is connected to the hub",
    )


class ReadGate:
    """Pauses the reader of a link while its inboxes are full, unless an answer is awaited.

    A session that stops reading leaves relayed frames at the hub, where the window then stops their
    senders. But answers and credit arrive on the same socket: while a request or a relay of this
    session waits, the gate stays open. Otherwise two full sessions would block each other.
    """

    def __init__(self) -> None:
        self._held = False
        self._waiting = 0
        self._open = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether reading must pause."""
        return self._held and not self._waiting

    def hold(self) -> None:
        """Close the gate, unless it is kept open."""
        self._held = True
        self._update()

    def release(self) -> None:
        """Open the gate."""
        self._held = False
        self._update()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the gate open inside a `with` block."""
        self._waiting += 1
        self._update()
        try:
            yield
        finally:
            self._waiting -= 1
            self._update()

    async def wait_open(self) -> bool:
        """Wait until the gate is open; return whether it was closed."""
        waited = False
        while self.closed:
            waited = True
            await self._open.wait()
        return waited

    def _update(self) -> None:
        if self.closed:
            self._open.clear()
        else:
            self._open.set()
