"""Producers that cost as little as possible, so that a benchmark measures the other side.

`python -m bench.kit.lean_clients KIND HOST PORT TOKEN FIRST COUNT BATCH PACE` opens COUNT sessions,
says "ready", waits for a line with a number of seconds, puts for so long and prints one line of
JSON: the messages acknowledged per second, and how long each of a sample of them took, in ms.

    hub     a WebSocket session of a hub each; BATCH messages in one frame
    nats    a connection to a NATS server each, publishing into a JetStream stream

Every session has one frame (nats: BATCH messages) under way and sends the next when all of it is
acknowledged; PACE > 0 makes it wait so many seconds from one to the next.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import cast

from atoll.net.handshake import make_hello
from atoll.wire.frames import decode
from atoll.wire.messages import (
    Failure,
    QueueEntry,
    QueuePut,
    QueuePutDone,
    QueuePutMany,
    QueuePutManyDone,
    Welcome,
    pack,
    unpack,
)

PAYLOAD = bytes(200)
QUEUE = "bench/experience"
STREAM_SUBJECT = "bench.experience"
OPENED_AT_ONCE = 100
SAMPLE = 3_000


class Producer(asyncio.Protocol, abc.ABC):
    """One session: sends, waits for the acknowledgement, sends again."""

    def __init__(self, number: int, batch: int, pace_s: float) -> None:
        self.number, self.batch, self.pace_s = number, batch, pace_s
        self.loop = asyncio.get_running_loop()
        self.open: asyncio.Future[None] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.sent = self.acknowledged = 0
        self.began = self.end = self.seconds = 0.0
        self.trips: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the greeting."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is of another family
        self.greet()

    def connection_lost(self, error: Exception | None) -> None:
        """Let who waits hear of it."""
        for waiting in (self.open, self.ended):
            if not waiting.done():
                waiting.set_exception(ConnectionError(f"{self.number}: {error}"))

    def data_received(self, data: bytes) -> None:
        """Take what is complete."""
        self.buffer += data
        while self.take():
            pass

    def start(self, seconds: float) -> None:
        """Begin to put soon, not all at the same moment, for so long."""
        self.seconds = seconds
        self.loop.call_later(random.random() * max(self.pace_s, 0.05), self.begin)

    def begin(self) -> None:
        """Begin to put now."""
        self.end = time.perf_counter() + self.seconds
        self.next()

    def rate(self) -> float:
        """Return the messages per second that were acknowledged."""
        last = max(self.began, self.end)
        return self.acknowledged / (self.seconds + last - self.end)

    def next(self) -> None:
        """Send the next frame, or end."""
        self.began = time.perf_counter()
        if self.began >= self.end:
            self.ended.set_result(None)
        elif self.transport is not None:
            self.transport.write(self.frame())
            self.sent += 1

    def done(self) -> None:
        """Note that all of the last frame is acknowledged."""
        now = time.perf_counter()
        self.trips.append(now - self.began)
        self.acknowledged += self.batch
        wait_s = self.began + self.pace_s - now
        if wait_s > 0:
            self.loop.call_later(wait_s, self.next)
        else:
            self.next()

    @abc.abstractmethod
    def greet(self) -> None:
        """Say what comes first."""

    @abc.abstractmethod
    def take(self) -> bool:
        """Take one message from the buffer; False when none is whole."""

    @abc.abstractmethod
    def frame(self) -> bytes:
        """Return what is sent next."""


class HubProducer(Producer):
    """A session of a hub. Frames are masked with zeros, which leaves them as they are."""

    def __init__(self, number: int, batch: int, pace_s: float, *, token: str) -> None:
        super().__init__(number, batch, pace_s)
        self.token = token
        self.upgraded = False

    def greet(self) -> None:
        """Ask for a WebSocket."""
        key = base64.b64encode(os.urandom(16)).decode()
        assert self.transport is not None
        self.transport.write(
            f"GET /ws HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def take(self) -> bool:
        """Take one message from the buffer; False when none is whole."""
        if not self.upgraded:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            assert self.buffer.startswith(b"HTTP/1.1 101"), bytes(self.buffer[:60])
            del self.buffer[: end + 4]
            self.upgraded = True
            hello = make_hello(f"bench/w{self.number}", self.token)
            assert self.transport is not None
            self.transport.write(masked(pack(hello, id=1)))
            return True
        size = len(self.buffer)
        if size < 2:
            return False
        length, head = self.buffer[1], 2
        if length == 126:
            if size < 4:
                return False
            (length,) = struct.unpack_from("!H", self.buffer, 2)
            head = 4
        if size < head + length:
            return False
        message = bytes(self.buffer[head : head + length])
        del self.buffer[: head + length]
        self.on_message(message)
        return True

    def on_message(self, message: bytes) -> None:
        """Take one message of the hub."""
        body = unpack(decode(message)).body
        if isinstance(body, Welcome):
            self.open.set_result(None)
        elif isinstance(body, QueuePutDone | QueuePutManyDone):
            self.done()
        elif isinstance(body, Failure):
            raise RuntimeError(body.error)

    def frame(self) -> bytes:
        """Return what is sent next."""
        key = f"{self.number}-{self.sent}"
        if self.batch == 1:
            return masked(pack(QueuePut(QUEUE, key, PAYLOAD), id=self.sent + 2))
        items = [QueueEntry(f"{key}-{place}", PAYLOAD) for place in range(self.batch)]
        return masked(pack(QueuePutMany(QUEUE, items), id=self.sent + 2))


class NatsProducer(Producer):
    """A connection to a NATS server."""

    waiting = 0

    def greet(self) -> None:
        """Nothing: the server speaks first."""

    def take(self) -> bool:
        """Take one message from the buffer; False when none is whole."""
        end = self.buffer.find(b"\r\n")
        if end < 0:
            return False
        line = bytes(self.buffer[:end])
        assert self.transport is not None
        if line.startswith(b"MSG"):
            length = int(line.rsplit(b" ", 1)[1])
            if len(self.buffer) < end + 4 + length:
                return False
            answer = bytes(self.buffer[end + 2 : end + 2 + length])
            del self.buffer[: end + 4 + length]
            assert b'"error"' not in answer, answer
            self.waiting -= 1
            if not self.waiting:
                self.done()
            return True
        del self.buffer[: end + 2]
        if line.startswith(b"INFO"):
            self.transport.write(
                b'CONNECT {"verbose":false,"headers":true}\r\nSUB r.%d 1\r\nPING\r\n' % self.number
            )
        elif line.startswith(b"PONG"):
            self.open.set_result(None)
        elif line.startswith(b"PING"):
            self.transport.write(b"PONG\r\n")
        else:
            raise RuntimeError(line)
        return True

    def frame(self) -> bytes:
        """Return what is sent next."""
        self.waiting = self.batch
        head = b"HPUB %s r.%d " % (STREAM_SUBJECT.encode(), self.number)
        pieces = []
        for place in range(self.batch):
            key = f"NATS/1.0\r\nNats-Msg-Id: {self.number}-{self.sent}-{place}\r\n\r\n".encode()
            pieces.append(head + b"%d %d\r\n" % (len(key), len(key) + len(PAYLOAD)))
            pieces += (key, PAYLOAD, b"\r\n")
        return b"".join(pieces)


def masked(payload: bytes) -> bytes:
    """Return a binary WebSocket frame of a client."""
    length = len(payload)
    if length < 126:
        return bytes((0x82, 0x80 | length)) + bytes(4) + payload
    if length < 65_536:
        return struct.pack("!BBH", 0x82, 0xFE, length) + bytes(4) + payload
    return struct.pack("!BBQ", 0x82, 0xFF, length) + bytes(4) + payload


async def run(
    make: Callable[[int], Producer], host: str, port: int, *, first: int, count: int
) -> dict[str, object]:
    """Open the sessions, put for as long as is asked, and return the figures."""
    loop = asyncio.get_running_loop()
    producers: list[Producer] = []
    for start in range(first, first + count, OPENED_AT_ONCE):
        some = range(start, min(start + OPENED_AT_ONCE, first + count))
        made = [make(number) for number in some]
        await asyncio.gather(*(loop.create_connection(lambda p=p: p, host, port) for p in made))  # type: ignore[misc]
        await asyncio.gather(*(producer.open for producer in made))
        producers += made
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    seconds = float(await loop.run_in_executor(None, sys.stdin.readline))
    for producer in producers:
        producer.start(seconds)
    await asyncio.gather(*(producer.ended for producer in producers))
    trips = [trip * 1e3 for producer in producers for trip in producer.trips]
    rate = sum(producer.rate() for producer in producers)
    for producer in producers:
        if producer.transport is not None:
            producer.transport.abort()
    sample = [round(trip, 2) for trip in random.sample(trips, min(SAMPLE, len(trips)))]
    return {"messages_per_s": rate, "trips_ms": sample}


def main(arguments: list[str]) -> None:
    """Be some of the producers of a benchmark."""
    kind, host, port, token, first, count, batch, pace = arguments

    def make(number: int) -> Producer:
        if kind == "nats":
            return NatsProducer(number, int(batch), float(pace))
        return HubProducer(number, int(batch), float(pace), token=token)

    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        found = runner.run(run(make, host, int(port), first=int(first), count=int(count)))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
