"""What durable queues can do, beside NATS JetStream: `python -m bench.queue [--quick]`.

    messages_per_s      200-byte messages acknowledged durably one by one, 1,000 producers on
                        1,000 WebSocket sessions, each with one message under way
    p50_ms, p99_ms      from put to acknowledgement, meanwhile
    batched             the same with ten messages in a frame, each acknowledged by itself: what
                        `run.queue` does when many are put at once
    paced               20,000 messages/s offered: each producer puts ten every half second
    nats                the same producers, each with a connection to NATS JetStream (file store)
    nats_synced         the first pattern against NATS with `sync_interval: always`: only then does
                        its acknowledgement mean what the hub's means: a power cut loses nothing
    ratio               the hub's messages per second over those of NATS, for each pattern
    claims_per_s        messages claimed and acknowledged, 20 consumers, 100 at a time
    ready_s             from the start of a hub with a million stored messages to its first answer

Hub, server and clients are processes of their own on the same cores: the clients take their share,
and are the same lean program on both sides. The two sides alternate, best of the rounds each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from atoll.net.handshake import make_hello
from atoll.net.sync_link import open_link
from atoll.wire.messages import QueueAckMany, QueueClaim, QueueItems, QueueOpen, QueueOptions
from bench.kit.hub_process import WAIT_S, RunningHub
from bench.kit.lean_clients import QUEUE, STREAM_SUBJECT
from bench.kit.ports import free_port
from bench.kit.report import emit

PRODUCERS = 1_000
PROCESSES = 2
CONSUMERS = 20
CLAIM = 100
STORED = 1_000_000
OFFERED_PER_S = 20_000
PACED_BATCH = 10


@dataclass(frozen=True)
class Pattern:
    """How producers put."""

    name: str
    batch: int
    pace_s: float = 0.0


ONE_BY_ONE = Pattern("one_by_one", batch=1)
BATCHED = Pattern("batched", batch=10)
PACED = Pattern("paced", batch=PACED_BATCH, pace_s=PRODUCERS * PACED_BATCH / OFFERED_PER_S)


@dataclass(frozen=True)
class Side:
    """Where producers put to."""

    kind: str
    host: str
    port: int
    token: str = "-"


def produce(side: Side, pattern: Pattern, *, seconds: float) -> dict[str, float]:
    """Run all producers against one side and return the figures."""
    share = PRODUCERS // PROCESSES
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(PROCESSES):
            command = [
                *(sys.executable, "-m", "bench.kit.lean_clients", side.kind, side.host),
                *(str(side.port), side.token, str(number * share), str(share)),
                *(str(pattern.batch), str(pattern.pace_s)),
            ]
            popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            clients.append(stack.enter_context(popen))
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != "ready\n":
                raise RuntimeError("a client did not start")
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(f"{seconds}\n")
            client.stdin.flush()
        found: list[dict[str, Any]] = []
        for client in clients:
            assert client.stdout is not None
            found.append(json.loads(client.stdout.readline()))
    trips = sorted(trip for one in found for trip in one["trips_ms"])
    cuts = statistics.quantiles(trips, n=100)
    return {
        "messages_per_s": sum(one["messages_per_s"] for one in found),
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
    }


@contextlib.contextmanager
def nats_server(*, synced: bool = False) -> Iterator[Side]:
    """Run a NATS server with a JetStream stream in files, flushed to disk every time or not."""
    program = Path(sys.executable).parent / "nats-server"
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        settings = Path(folder) / "nats.conf"
        interval = "always" if synced else "2m"
        store = Path(folder) / "store"
        settings.write_text(
            f'jetstream {{ store_dir: "{store}", sync_interval: {interval} }}', encoding="utf-8"
        )
        command = [
            *(str(program), "--addr", "127.0.0.1", "--port", str(port)),
            *("--config", str(settings), "--log", "/dev/null"),
        ]
        with subprocess.Popen(command) as popen:
            try:
                asyncio.run(_make_stream(port))
                yield Side("nats", "127.0.0.1", port)
            finally:
                popen.kill()


async def _make_stream(port: int) -> None:
    import nats

    connection = await nats.connect(
        f"nats://127.0.0.1:{port}", connect_timeout=5, max_reconnect_attempts=50,
        reconnect_time_wait=0.1,
    )  # fmt: skip
    stream = connection.jetstream()
    await stream.add_stream(name="bench", subjects=[STREAM_SUBJECT], duplicate_window=120)
    await connection.close()


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[tuple[RunningHub, float]]:
    """Run a hub on what is in a folder; give it and the seconds until it was ready."""
    started = time.perf_counter()
    command = [
        *(sys.executable, "-m", "atoll.hub", "--no-reducers"),
        *("--data", str(folder / "data"), "--jobs", str(folder / "jobs")),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        try:
            ready = json.loads(popen.stdout.readline())
            seconds = time.perf_counter() - started
            process = psutil.Process(popen.pid)
            yield RunningHub(ready["url"], ready["operator_token"], process), seconds
        finally:
            popen.terminate()


def side_of(target: RunningHub) -> Side:
    """Return a hub as a side."""
    parts = urlsplit(target.url)
    return Side("hub", parts.hostname or "", parts.port or 0, target.token)


async def consume(target: RunningHub, *, seconds: float) -> float:
    """Return how many of the stored messages are claimed and acknowledged per second."""
    end, done = time.perf_counter() + seconds, 0

    async def consumer(number: int) -> None:
        nonlocal done
        link = await open_link(
            target.url, make_hello(f"bench/c{number}", target.token), timeout_s=WAIT_S
        )
        try:
            while time.perf_counter() < end:
                claim = QueueClaim(QUEUE, 60.0, CLAIM)
                answer = await link.request(claim, timeout_s=WAIT_S)
                assert isinstance(answer, QueueItems)
                leases = [item.lease for item in answer.items]
                if not leases:
                    return
                await link.request(QueueAckMany(QUEUE, leases), timeout_s=WAIT_S)
                done += len(leases)
        finally:
            await link.close()

    began = time.perf_counter()
    await asyncio.gather(*(consumer(number) for number in range(CONSUMERS)))
    return done / (time.perf_counter() - began)


async def give_room(target: RunningHub) -> None:
    """Let the queue hold as much as comes."""
    link = await open_link(target.url, make_hello("bench/c", target.token), timeout_s=WAIT_S)
    await link.request(QueueOpen(QUEUE, QueueOptions(max_items=0)), timeout_s=WAIT_S)
    await link.close()


def ready_with_a_million(folder: Path) -> float:
    """Return the seconds in which a hub is ready that has a million messages stored."""
    with hub(folder):
        pass  # makes the tables
    with sqlite3.connect(folder / "data" / "hub.sqlite") as connection:
        connection.executemany(
            "INSERT INTO queue_items (queue, key, payload, nbytes, put) VALUES (?, ?, ?, 200, 1)",
            ((QUEUE, f"stored-{number}", bytes(200)) for number in range(STORED)),
        )
    connection.close()
    with hub(folder) as (target, seconds):
        rows = asyncio.run(_rows(target))
        assert rows == STORED, rows
    return seconds


async def _rows(target: RunningHub) -> int:
    import httpx

    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {target.token}"}) as client:
        answer = await client.get(f"{target.url}/api/queues", timeout=WAIT_S)
    return sum(row["ready"] for row in answer.json())


def measure(*, seconds: float, rounds: int, patterns: list[Pattern]) -> dict[str, Any]:
    """Return every figure."""
    best: dict[str, dict[str, dict[str, float]]] = {"hub": {}, "nats": {}}
    claims: list[float] = []
    synced: list[dict[str, float]] = []
    for _ in range(rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            hub(Path(folder)) as (target, _),
            nats_server() as nats,
        ):
            asyncio.run(give_room(target))
            for pattern in patterns:
                for side in (side_of(target), nats):
                    found = produce(side, pattern, seconds=seconds)
                    before = best[side.kind].get(pattern.name)
                    if before is None or found["messages_per_s"] > before["messages_per_s"]:
                        best[side.kind][pattern.name] = found
            with nats_server(synced=True) as careful:
                synced.append(produce(careful, ONE_BY_ONE, seconds=seconds))
            claims.append(asyncio.run(consume(target, seconds=seconds)))
    with tempfile.TemporaryDirectory() as folder:
        ready_s = ready_with_a_million(Path(folder))
    both = {kind: dict(found) for kind, found in best.items()}
    ours, theirs = best["hub"], best["nats"]
    return {
        **ours.pop(ONE_BY_ONE.name, {}),
        **ours,
        "nats": {**theirs.pop(ONE_BY_ONE.name, {}), **theirs},
        "ratio": {
            pattern.name: both["hub"][pattern.name]["messages_per_s"]
            / both["nats"][pattern.name]["messages_per_s"]
            for pattern in patterns
        },
        "nats_synced": max(synced, key=lambda found: found["messages_per_s"]),
        "claims_per_s": max(claims),
        "ready_s": ready_s,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m bench.queue", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = measure(
        seconds=2.0 if given.quick else 8.0,
        rounds=1 if given.quick else 3,
        patterns=[ONE_BY_ONE, BATCHED, PACED],
    )
    rounded: dict[str, Any] = json.loads(
        json.dumps(found), parse_float=lambda text: round(float(text), 3)
    )
    emit(rounded, table(rounded))


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the report: each pattern on both sides."""
    rows = []
    for name, ratio in found["ratio"].items():
        ours = found if name == ONE_BY_ONE.name else found[name]
        theirs = found["nats"] if name == ONE_BY_ONE.name else found["nats"][name]
        rows.append(
            {
                "pattern": name,
                "hub/s": ours["messages_per_s"],
                "p99 ms": ours["p99_ms"],
                "nats/s": theirs["messages_per_s"],
                "nats p99 ms": theirs["p99_ms"],
                "ratio": ratio,
            }
        )
    return rows


if __name__ == "__main__":
    main()
