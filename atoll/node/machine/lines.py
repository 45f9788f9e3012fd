"""Rates and round trips between the machines of a job, measured by its own processes.

Each member listens on the addresses at which others may reach it, and publishes them on a topic of
the job. In order of their slots, one at a time, members connect to all later ones: simultaneous
measurements would share a link. To an unreachable member, e.g. behind a home router, all rates are
zero.

A connection begins with the job's secret, then a letter:

  P  the listener sends every byte back: the round trip
  U  the listener receives until the end, and returns the rate in bits per second
  D  the listener sends for the time of one transfer

The first third of a transfer does not count, while TCP's window grows.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.net.accepting import accepted, stop_listening
from atoll.node.machine.interfaces import meeting_addresses

PINGS = 7
BLOCK = bytes(1 << 16)
CONNECT_S = 2.0
SILENT_S = 15.0
"""How long the other side may send or take nothing: its machine may be busy."""
GROWING = 1 / 3
SECRET_BYTES = 16
MEETING_S = 120.0
"""How long members wait for each other's addresses, and for their turn."""
TURN_S = 20.0
_NUMBER = struct.Struct("!d")


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one member measured to another; 0: nothing arrived."""

    to: str
    up_mbps: float = 0.0
    """To the other."""
    down_mbps: float = 0.0
    latency_ms: float = 0.0


class Listener:
    """Answers measurements on a port of this machine until it is closed."""

    def __init__(self, secret: bytes, *, seconds: float) -> None:
        """Listen on all interfaces; each transfer lasts so many seconds."""
        self._secret, self._seconds = secret, seconds
        self._server = socket.create_server(("", 0))
        self.port = int(self._server.getsockname()[1])
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="lines", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        stop_listening(self._server, self._closed)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self) -> None:
        for connection, _ in accepted(self._server, self._closed):
            with connection, contextlib.suppress(OSError):
                connection.settimeout(SILENT_S + 3 * self._seconds)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        if not secrets.compare_digest(_exactly(connection, SECRET_BYTES), self._secret):
            return
        letter = _exactly(connection, 1)
        if letter == b"P":
            while byte := connection.recv(1):
                connection.sendall(byte)
        elif letter == b"U":
            connection.sendall(_NUMBER.pack(_received_bps(connection)))
        elif letter == b"D":
            _send_for(connection, self._seconds)


def measure_line(
    to: str, addresses: Sequence[str], port: int, *, secret: bytes, seconds: float
) -> Line:
    """Return the rates and the round trip to a listener; zeros if no address reaches it."""
    for address in addresses:
        try:
            trip_s = _trip_s((address, port), secret)
            with _connected((address, port), secret, b"U", seconds) as connection:
                _send_for(connection, seconds)
                connection.shutdown(socket.SHUT_WR)
                (up_bps,) = _NUMBER.unpack(_exactly(connection, _NUMBER.size))
            with _connected((address, port), secret, b"D", seconds) as connection:
                down_bps = _received_bps(connection)
        except OSError:
            continue
        return Line(
            to=to, up_mbps=round(up_bps / 1e6, 3), down_mbps=round(down_bps / 1e6, 3),
            latency_ms=round(1000 * trip_s, 3),
        )  # fmt: skip
    return Line(to=to)


def measure_all(run: Any, *, wanted: int, hub: str, seconds: float, folder: Path) -> list[Line]:
    """Measure the lines of this member of a job to all later ones; publish them as a file.

    Args:
        run: The process's place in the job (`atoll.join()`).
        wanted: Members of the job.
        hub: Its hub, towards which addresses are chosen.
        seconds: Of each transfer.
        folder: For the file, `lines-MEMBER.json`.
    """
    topic = run.topic("lines", max_items=10_000)
    entries = topic.subscribe(run.member, start="oldest")
    own = secrets.token_bytes(SECRET_BYTES)
    with Listener(own, seconds=seconds) as listener:
        topic.publish(
            {
                "member": run.member, "addresses": meeting_addresses(hub), "port": listener.port,
                "secret": own.hex(),
            }
        )  # fmt: skip
        known = _Known(entries)
        known.until(lambda: len(known.places) >= wanted, MEETING_S)
        order = sorted(known.places, key=lambda name: int(name[1:]))
        index = order.index(run.member)
        known.until(lambda: known.done >= set(order[:index]), MEETING_S + TURN_S * index)
        found = [
            measure_line(
                other, known.places[other]["addresses"], known.places[other]["port"],
                secret=bytes.fromhex(known.places[other]["secret"]), seconds=seconds,
            )
            for other in order[index + 1 :]
        ]  # fmt: skip
        path = folder / f"lines-{run.member}.json"
        path.write_text(json.dumps([asdict(line) for line in found]), "utf-8", newline="\n")
        run.publish(path, path.name)
        topic.publish({"done": run.member})
        known.until(lambda: known.done >= set(order), MEETING_S + TURN_S * len(order))
    return found


class _Known:
    """What the members have said on the topic."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self.places: dict[str, dict[str, Any]] = {}
        self.done: set[str] = set()

    def until(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            for entry in self._entries.read(100, wait_s=1.0):
                value = entry.value
                if "done" in value:
                    self.done.add(value["done"])
                else:
                    self.places[value["member"]] = value
                self._entries.ack(entry)


@contextlib.contextmanager
def _connected(
    address: tuple[str, int], secret: bytes, letter: bytes, seconds: float
) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=CONNECT_S) as connection:
        connection.settimeout(SILENT_S + 3 * seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(secret + letter)
        yield connection


def _trip_s(address: tuple[str, int], secret: bytes) -> float:
    durations = []
    with _connected(address, secret, b"P", 1.0) as connection:
        for _ in range(PINGS):
            begun = time.perf_counter()
            connection.sendall(b".")
            _exactly(connection, 1)
            durations.append(time.perf_counter() - begun)
    return statistics.median(durations[1:])


def _send_for(connection: socket.socket, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.sendall(BLOCK)


def _received_bps(connection: socket.socket) -> float:
    """Return the bits per second received until the end, without the beginning."""
    begun, marks, total = time.monotonic(), [(0.0, 0)], 0
    while block := connection.recv(1 << 16):
        total += len(block)
        marks.append((time.monotonic() - begun, total))
    end_s = marks[-1][0]
    since_s, before = next(mark for mark in marks if mark[0] >= GROWING * end_s)
    if end_s <= since_s:  # all but the last block came in the beginning: the whole counts
        since_s, before = marks[0]
    return 8 * (total - before) / (end_s - since_s) if end_s > since_s else 0.0


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        block = connection.recv(count - len(found))
        if not block:
            raise ConnectionError("the other side has closed the connection")
        found += block
    return found
