"""Bandwidth limits in bits per second.

A bucket is one number: the time at which all bytes so far are paid for. Each message advances it by
its size and may pass at that time, or slightly earlier (the burst). Processes of a machine share a
limit through a small file with that number; all of them have the same monotonic clock.

Tensors wait until they are paid for. Control messages are counted but pass at once; later tensors
pay for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from atoll.net.endpoint import HubEndpoint
from atoll.system import LOCKS_WAIT, lock_waiting, unlock

BURST_S = 0.05
"""Seconds' worth of bytes that may pass early, since timers are not exact."""

URGENT_S = 2.0
"""Seconds by which control messages may exceed the limit before they wait, too."""

BLOCK_BYTES = 64 * 2**10
"""Largest piece of a file that is paid for at once."""

_NUMBER = struct.Struct("!d")


class SharedBudget:
    """The number of one bucket, in a shared file or in this process."""

    def __init__(self, path: str, *, offset: int) -> None:
        """Use `offset` of the file; without a file the number belongs to this process."""
        self._offset = offset
        self._own = 0.0
        self._file = -1
        with contextlib.suppress(OSError):
            if path and LOCKS_WAIT:
                self._file = os.open(path, os.O_RDWR)

    def change(self, step: Callable[[float], float]) -> float:
        """Replace the number by `step(number)`, and return it."""
        if self._file < 0:
            self._own = step(self._own)
            return self._own
        lock_waiting(self._file)
        try:
            kept = os.pread(self._file, _NUMBER.size, self._offset)
            number = step(_NUMBER.unpack(kept)[0] if len(kept) == _NUMBER.size else 0.0)
            os.pwrite(self._file, _NUMBER.pack(number), self._offset)
            return number
        finally:
            unlock(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Bucket:
    """A rate limit for one thread; with a file it is shared between threads and processes."""

    def __init__(
        self,
        bps: float,
        *,
        ledger: SharedBudget,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bps = bps
        self._ledger = ledger
        self._monotonic = monotonic

    def spend(self, nbytes: int, *, urgent: bool = False) -> float:
        """Count bytes; return the seconds until they may pass. `urgent`: a control message."""
        now = self._monotonic()
        cost_s = nbytes * 8 / self._bps

        def step(paid_at: float) -> float:
            if paid_at > now + _FUTURE_S:  # written before a reboot, which resets the clock
                paid_at = now
            return max(paid_at, now) + cost_s

        paid_at = self._ledger.change(step)
        return max(0.0, paid_at - now - (URGENT_S if urgent else BURST_S))

    def close(self) -> None:
        """Close the file."""
        self._ledger.close()


_FUTURE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Throttle:
    """Limits of both directions of an endpoint; None: no limit."""

    up: Bucket | None
    down: Bucket | None

    async def sent(self, nbytes: int, *, urgent: bool) -> None:
        """Wait until these bytes may be sent."""
        wait_s = 0.0 if self.up is None else self.up.spend(nbytes, urgent=urgent)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def received(self, nbytes: int, *, urgent: bool) -> float:
        """Count received bytes; return the seconds until more may be read."""
        return 0.0 if self.down is None else self.down.spend(nbytes, urgent=urgent)

    def close(self) -> None:
        """Close the files."""
        for bucket in (self.up, self.down):
            if bucket is not None:
                bucket.close()


def throttle_of(endpoint: HubEndpoint) -> Throttle:
    """Return the limits of an endpoint."""
    up = (
        Bucket(endpoint.upload_bps, ledger=SharedBudget(endpoint.pace, offset=0))
        if endpoint.upload_bps
        else None
    )
    size = _NUMBER.size
    down = (
        Bucket(endpoint.download_bps, ledger=SharedBudget(endpoint.pace, offset=size))
        if endpoint.download_bps
        else None
    )
    return Throttle(up, down)


class ThrottledHttp(httpx.BaseTransport):
    """An httpx transport with limits on request and response bodies."""

    def __init__(self, inner: httpx.BaseTransport, throttle: Throttle) -> None:
        self._inner = inner
        self._throttle = throttle

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the response, with both bodies throttled."""
        if self._throttle.up is not None and isinstance(request.stream, httpx.SyncByteStream):
            request.stream = _Slowed(request.stream, self._throttle.up)
        response = self._inner.handle_request(request)
        if self._throttle.down is not None and isinstance(response.stream, httpx.SyncByteStream):
            response.stream = _Slowed(response.stream, self._throttle.down)
        return response

    def close(self) -> None:
        """Close connections and files."""
        self._inner.close()
        self._throttle.close()


class _Slowed(httpx.SyncByteStream):
    """A body stream that waits for its bucket."""

    def __init__(self, inner: httpx.SyncByteStream, bucket: Bucket) -> None:
        self._inner = inner
        self._bucket = bucket

    def __iter__(self) -> Iterator[bytes]:
        for block in self._inner:
            for start in range(0, len(block), BLOCK_BYTES):
                piece = block[start : start + BLOCK_BYTES]
                wait_s = self._bucket.spend(len(piece))
                if wait_s > 0:
                    time.sleep(wait_s)
                yield piece

    def close(self) -> None:
        self._inner.close()
