"""What others notice of one token that does its worst: `python -m bench.flood [--quick]`.

A hub with its reducer, and a job of two members that do rounds of 4 MB through it, as threads of
this process. Beside them a process with the token of another job's member does one of the attacks
for a while, as fast as it can; for `connections` and `joins` it needs no token.

round_ratio     median of the rounds' seconds during the attack, by that of the time before it
against_control the same by that beside the control: a process of the same priority that uses as
                much of the processors as the attacker did, and leaves the hub alone. What is above
                1 is the hub's; the rest of `round_ratio` is that all share the processors
healthz_p99_s   99 of 100 requests to /healthz, ten per second, were answered in this time; those
                whose connection was dropped are asked again, and the time goes on
cpu_ratio       the hub's processor time per second during the attack, by that before
rss_growth_mb   the hub's memory at the end of the attack, less that before it
sent            frames, requests or connections of the attacker

Every attack is made in turns of quiet, attack and control, so that what else happens on the machine
meets all three. All share the processors of this machine. The attacker has a lower priority there,
as it stands for another machine; `sent` shows whether it came to its limits.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as open_socket

from atoll.codec.registry import make_codec
from atoll.errors import AtollError
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.ids import session_id
from atoll.net.handshake import make_hello
from atoll.net.sync_link import connect
from atoll.wire.frames import encode_relay
from atoll.wire.messages import (
    Event,
    LogLines,
    Message,
    Metrics,
    Point,
    QueueClaim,
    QueuePut,
    pack,
)
from bench.kit.report import emit
from bench.reduce import Node, running_hub, single_threaded

ELEMENTS = 1_000_000
ATTACKS = ("claims", "puts", "logs", "metrics", "events", "relay", "connections", "joins")
WINDOW = 900
"""Requests that an attacker has open: more would end its session."""


# ----------------------------------------------------------------------------- the attacker


def frame_of(kind: str, number: int, *, job: str) -> bytes:
    """Return one frame of an attack."""
    body: Message
    if kind == "claims":
        body = QueueClaim(queue=f"{job}/q{number % 100}", lease_s=60.0, limit=1000, wait_s=60.0)
    elif kind == "puts":
        body = QueuePut(queue=f"{job}/q{number % 100}", key=str(number), payload=bytes(10_000))
    elif kind == "logs":
        body = LogLines(job=job, member="w0", seq=500 * number, lines=["x" * 200] * 500)
    elif kind == "metrics":
        values = {f"m{(number + n) % 5000}": float(n) for n in range(50)}
        point = Point(time=time.time(), step=number, round=0, values=values)
        body = Metrics(incarnation="i", seq=number, points=[point])
    elif kind == "events":
        body = Event(kind="note", text="x" * 1000)
    else:
        return encode_relay(session_id(job, "w1"), session_id(job, "w0"), b"x" * 100)
    return pack(body, id=number)


def attack(kind: str, url: str, token: str, job: str, seconds: float) -> int:
    """Do one attack; return how much was sent."""
    end, count = time.monotonic() + seconds, 0
    if kind == "connections":
        return flood_connections(url, end)
    if kind == "joins":
        return flood_joins(url, end)
    numbers = itertools.count(2)
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ConnectionClosed):
            count += flood_session(kind, url, token, job, numbers, end)
    return count


def flood_session(
    kind: str, url: str, token: str, job: str, numbers: Iterator[int], end: float
) -> int:
    """Send frames over one session, until the hub closes it or the time is over."""
    room, count = threading.Semaphore(WINDOW), 0
    with open_socket(
        url.replace("http", "ws", 1) + "/ws", compression=None, max_size=None, ping_interval=None
    ) as opened:
        opened.send(pack(make_hello(session_id(job, "w0"), token), id=1))

        def drain() -> None:
            with contextlib.suppress(ConnectionClosed, OSError):
                while True:
                    opened.recv()
                    room.release()

        threading.Thread(target=drain, daemon=True).start()
        with contextlib.suppress(ConnectionClosed):
            while time.monotonic() < end:
                if kind != "relay" and not room.acquire(timeout=0.5):
                    continue
                opened.send(frame_of(kind, next(numbers), job=job))
                count += 1
    return count


def keep_busy(share: float, seconds: float) -> None:
    """Use this share of a processor for a while, in slices as short as those of the attacks."""
    began, used, end = time.monotonic(), time.process_time(), time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        if time.process_time() - used < share * (now - began):
            sum(range(2_000))
        else:
            time.sleep(0.001)


def flood_joins(url: str, end: float) -> int:
    """Guess tickets over one connection, as fast as the answers come."""
    host, _, port = url.rpartition("/")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30.0)
    count = 0
    while time.monotonic() < end:
        body = json.dumps({"secret": f"guess{count}" * 4, "name": "x"})
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/api/join", body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            count += 1
    connection.close()
    return count


def flood_connections(url: str, end: float) -> int:
    """Open connections that say a part of a head, and keep the newest thousands."""
    host, _, port = url.rpartition("/")[2].partition(":")
    lines: list[socket.socket] = []
    count = 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            line = socket.create_connection((host, int(port)), timeout=1.0)
            line.sendall(b"GET /" + b"a" * 10_000)
            lines.append(line)
            count += 1
        while len(lines) > 3000:
            lines.pop(0).close()
    for line in lines:
        line.close()
    return count


# -------------------------------------------------------------------------------- the others


class Rounds:
    """Two members that do one round after the other, and how long each took."""

    def __init__(self, hub: dict[str, str], job: str, tokens: dict[str, str]) -> None:
        """Join and start."""
        self.seconds: list[float] = []
        self._over = threading.Event()
        links = [
            connect(hub["url"], make_hello(session_id(job, member), token))
            for member, token in sorted(tokens.items())
        ]
        groups = [
            HubGroup(link, job=job, member=member, hub=hub["url"], route="relay")
            for link, member in zip(links, sorted(tokens), strict=True)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(group,), daemon=True) for group in groups
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, group: HubGroup) -> None:
        slot, codec = group.register().slot, make_codec("fp32")
        mine = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(slot))
        while not self._over.is_set():
            began = time.perf_counter()
            with contextlib.suppress(AtollError):
                group.join(PeriodReport(group.committed_round, "base"))
                reduced = group.reduce([mine], codec=codec, weight=1.0).wait()
                group.commit(reduced)
                if slot == 0:
                    self.seconds.append(time.perf_counter() - began)

    def during(self, seconds: float) -> list[float]:
        """Return the rounds that ended within so many seconds from now, at least three."""
        before, end = len(self.seconds), time.monotonic() + seconds
        while time.monotonic() < end or len(self.seconds) < before + 3:
            time.sleep(0.05)
            if time.monotonic() > end + 120:
                raise SystemExit("no round has ended for two minutes")
        return self.seconds[before:]

    def stop(self) -> None:
        """Let the members end with what they do."""
        self._over.set()


def watch_health(url: str, found: list[tuple[float, float]], over: threading.Event) -> None:
    """Ask /healthz ten times a second until it is over; note when, and how long each took."""
    while not over.wait(0.1):
        began = time.monotonic()
        for _ in range(100):
            connection = http.client.HTTPConnection(url.rpartition("/")[2], timeout=30.0)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/healthz")
                connection.getresponse().read()
                break
            connection.close()
        connection.close()
        found.append((time.monotonic(), time.monotonic() - began))


@dataclass
class Seen:
    """What was seen in one kind of turns."""

    seconds: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def round_s(self) -> float:
        """Return the median of a round's seconds."""
        return statistics.median(self.seconds)


class Bench:
    """The hub, the members' rounds and the requests to /healthz that are measured."""

    def __init__(
        self, rounds: Rounds, hub: dict[str, str], process: psutil.Process, node: Node
    ) -> None:
        """Begin to ask for /healthz, attack or not: that takes time of the processors, too."""
        self.rounds, self.hub, self.process, self.node = rounds, hub, process, node
        self.health: list[tuple[float, float]] = []
        self.over = threading.Event()
        self._watcher = threading.Thread(
            target=watch_health, args=(hub["url"], self.health, self.over)
        )
        self._watcher.start()

    def close(self) -> None:
        """Stop to ask."""
        self.over.set()
        self._watcher.join()

    def during(self, seconds: float, seen: Seen) -> None:
        """Watch for so many seconds."""
        clock, began = Clock(self.process), time.monotonic()
        seen.seconds += self.rounds.during(seconds)
        seen.cpu.append(clock.rate())
        # A request that was not answered yet counts with what it has waited.
        late = [time.monotonic() - self.health[-1][0]] if self.health else []
        seen.health += [took for at, took in self.health if at >= began] + late

    def beside(self, arguments: list[str], seconds: float, seen: Seen) -> list[str]:
        """Watch while a process of this module does something; return what it says at its end."""
        beside = subprocess.Popen(
            [sys.executable, "-m", "bench.flood", *arguments], stdout=subprocess.PIPE, text=True,
            env=single_threaded(), stdin=subprocess.PIPE,
        )  # fmt: skip
        assert beside.stdout is not None
        beside.stdout.readline()  # it is ready: what its start takes is no attack
        time.sleep(0.5)  # the rounds are as before
        assert beside.stdin is not None
        beside.stdin.write("go\n")
        beside.stdin.flush()
        self.during(seconds, seen)
        return beside.communicate(timeout=120)[0].split()

    def measure(self, kind: str, *, turns: int, seconds: float) -> dict[str, Any]:
        """Return the row of an attack."""
        quiet, attacked, control = Seen(), Seen(), Seen()
        sent, growth = 0, 0
        for _ in range(turns):
            self.during(seconds, quiet)
            # A new job for every turn: one that ends is launched anew, with other tokens.
            job, tokens = self.node.submit(nodes=2, route="relay")
            before = self.process.memory_info().rss
            command = ["--attack", kind, self.hub["url"], job, str(seconds)]
            count, share = self.beside([*command, f"--token={tokens['w0']}"], seconds, attacked)
            growth = max(growth, self.process.memory_info().rss - before)
            sent += int(count)
            self.beside(["--busy", share, str(seconds)], seconds, control)
            self.node.end(job)
        return {
            "attack": kind,
            "round_ratio": round(attacked.round_s / quiet.round_s, 2),
            "against_control": round(attacked.round_s / control.round_s, 2),
            "healthz_p99_s": round(sorted(attacked.health)[int(0.99 * len(attacked.health))], 3),
            "cpu_ratio": round(sum(attacked.cpu) / sum(quiet.cpu), 2),
            "rss_growth_mb": round(growth / 1e6, 1),
            "round_ms": round(1e3 * quiet.round_s, 1),
            "sent": sent,
        }


class Clock:
    """Processor seconds that a process uses per second."""

    def __init__(self, process: psutil.Process) -> None:
        """Start."""
        self._process = process
        self._last = self._now()

    def rate(self) -> float:
        """Return the rate since the last call."""
        last, self._last = self._last, self._now()
        return (self._last[1] - last[1]) / (self._last[0] - last[0])

    def _now(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return time.monotonic(), float(times.user + times.system)


def main() -> int:
    """Measure, or be an attacker."""
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of each, not four")
    parser.add_argument("--only", default="", help="one attack")
    parser.add_argument("--attack", nargs=4, metavar=("KIND", "URL", "JOB", "SECONDS"))
    parser.add_argument("--busy", nargs=2, metavar=("SHARE", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("--token", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack or options.busy:
        be_beside(options)
        return 0
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder, running_hub(Path(folder)) as hub:
        (process,) = [
            child for child in psutil.Process().children() if "atoll.hub" in child.cmdline()
        ]
        node = Node(hub)
        rounds = Rounds(hub, *node.submit(nodes=2, route="relay"))
        rounds.during(2.0)
        bench = Bench(rounds, hub, process, node)
        for kind in [options.only] if options.only else ATTACKS:
            rows.append(bench.measure(kind, turns=1 if options.quick else 4, seconds=5.0))
            sys.stderr.write(f"{rows[-1]}\n")
        bench.close()
        rounds.stop()
        node.close()
    emit({"rows": rows}, rows)
    os._exit(0)  # the members wait for a hub that has ended


def be_beside(options: argparse.Namespace) -> None:
    """Attack, or be the control; say how much was sent and which share of a processor it took."""
    os.nice(10)  # it stands for another machine
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    began, used, sent = time.monotonic(), time.process_time(), 0
    if options.busy:
        share, seconds = map(float, options.busy)
        keep_busy(share, seconds)
    else:
        kind, url, job, length = options.attack
        sent = attack(kind, url, options.token, job, float(length))
    share = (time.process_time() - used) / (time.monotonic() - began)
    sys.stdout.write(f"{sent} {share:.4f}\n")


if __name__ == "__main__":
    sys.exit(main())
