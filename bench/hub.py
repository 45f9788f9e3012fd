"""What a hub costs and what it can do, on this machine: `python -m bench.hub [--quick]`.

    ready_s             from the start of the process to its first answer, median
    rss_mb ...          resident memory with no, 4, 100 and 1000 idle nodes, heartbeats included
    idle_nodes ...      what 5000 idle nodes (quick: 1000) cost: see `bench.idle`
    messages_per_s      requests answered, 100 sessions with 8 open requests each
    p99_ms              99th percentile of a request's round trip at 500 requests a second
    puts_per_s          items stored durably in a queue, 100 sessions with one open request each
    relay_mb_s          payload from one session to another in 256 KiB chunks, wall clock
    relay_mb_per_cpu_s  the same, per second of the hub's processor time

The hub, the clients and the two ends of the relay are processes of their own, over loopback; with
fewer cores than processes the wall-clock figures are lower bounds, those per processor second are
not concerned.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from atoll.net.handshake import greet, make_hello
from atoll.net.link import Link
from atoll.net.sync_link import connect, open_link
from atoll.net.transport import Transport
from atoll.net.websocket import dial
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Beat, NodeInfo, QueuePut, pack
from bench.idle import idle
from bench.kit.hub_process import MEGABYTE, WAIT_S, RunningHub, hub
from bench.kit.report import emit

SESSIONS = 100
OPEN_REQUESTS = 8
PACE_PER_S = 500
INFO = NodeInfo("bench", "Linux", "3", "0")


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    starts: int
    node_counts: tuple[int, ...]
    seconds: float
    relay_bytes: int
    idle_nodes: int
    idle_s: float


QUICK = Effort(
    starts=2,
    node_counts=(4, 100, 1000),
    seconds=2.0,
    relay_bytes=200_000_000,
    idle_nodes=1_000,
    idle_s=5.0,
)
FULL = Effort(
    starts=5,
    node_counts=(4, 100, 1000),
    seconds=10.0,
    relay_bytes=2_000_000_000,
    idle_nodes=5_000,
    idle_s=20.0,
)


# ---------------------------------------------------------------------------------- memory


async def memory_with_nodes(target: RunningHub, counts: tuple[int, ...]) -> dict[int, float]:
    """Return the hub's resident MB with so many connected nodes, two heartbeats after the last."""
    links: list[Link] = []
    found: dict[int, float] = {}
    try:
        for count in counts:
            while len(links) < count:
                some = range(len(links), min(count, len(links) + 50))
                links += await asyncio.gather(*(node(target, number) for number in some))
            welcome = links[0].welcome
            await asyncio.sleep(2 * welcome.heartbeat_s if welcome else 0.0)
            found[count] = target.rss_mb()
    finally:
        await asyncio.gather(*(link.close() for link in links))
    return found


async def node(target: RunningHub, number: int) -> Link:
    return await open_link(
        target.url, make_hello(f"bench-{number}", target.token, info=INFO), timeout_s=WAIT_S
    )


# -------------------------------------------------------------------------------- messages


async def enter(target: RunningHub, session: str) -> Transport:
    """Return a connection after its greeting: bare, so that little time goes into the client."""
    transport = await dial(target.url)
    await greet(transport, make_hello(session, target.token), id=1)
    return transport


async def throughput(target: RunningHub, *, seconds: float) -> float:
    """Return the requests per second that all sessions together get answered."""
    request = pack(Beat({"cpu": 0.5}), id=2)
    end = time.perf_counter() + seconds

    async def client(transport: Transport) -> int:
        answered = 0
        for _ in range(OPEN_REQUESTS):
            await transport.send(request)
        while time.perf_counter() < end:
            await transport.receive()
            await transport.send(request)
            answered += 1
        return answered

    return await together(target, client, seconds=seconds)


async def durable(target: RunningHub, *, seconds: float) -> float:
    """Return the queue items per second that are stored durably."""
    end = time.perf_counter() + seconds

    async def client(transport: Transport) -> int:
        stored = 0
        while time.perf_counter() < end:
            key = f"{id(transport)}-{stored}"
            await transport.send(pack(QueuePut("bench", key, bytes(200)), id=stored + 2))
            await transport.receive()
            stored += 1
        return stored

    return await together(target, client, seconds=seconds)


async def together(
    target: RunningHub, client: Callable[[Transport], Awaitable[int]], *, seconds: float
) -> float:
    """Run a client on every session and return the sum of their counts per second."""
    transports = [await enter(target, f"client-{number}") for number in range(SESSIONS)]
    try:
        started = time.perf_counter()
        counts = await asyncio.gather(*(client(transport) for transport in transports))
        return float(sum(counts) / max(seconds, time.perf_counter() - started))
    finally:
        await asyncio.gather(*(transport.close() for transport in transports))


async def latency(target: RunningHub, *, seconds: float) -> float:
    """Return the 99th percentile of round trips in ms, at a pace that leaves the hub time."""
    links = [await node(target, number) for number in range(10)]
    trips: list[float] = []

    async def client(link: Link, first_s: float) -> None:
        await asyncio.sleep(first_s)
        pause_s = len(links) / PACE_PER_S
        for _ in range(int(seconds / pause_s)):
            started = time.perf_counter()
            await link.request(Beat(), timeout_s=WAIT_S)
            trip = time.perf_counter() - started
            trips.append(trip)
            await asyncio.sleep(max(0.0, pause_s - trip))

    try:
        await asyncio.gather(*(client(link, n / PACE_PER_S) for n, link in enumerate(links)))
    finally:
        await asyncio.gather(*(link.close() for link in links))
    return statistics.quantiles(trips, n=100)[98] * 1e3


# ----------------------------------------------------------------------------------- relay


def receive(url: str, token: str, nbytes: int) -> None:
    """Be the receiving end: say when ready, take so many bytes, say when done."""
    hello = make_hello("bench/reducer", token)
    with connect(url, hello) as link, link.subscribe() as inbox:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        left = nbytes
        while left > 0:
            arrival = inbox.receive(deadline=time.monotonic() + WAIT_S)
            left -= len(getattr(arrival, "payload", b""))
        sys.stdout.write("done\n")
        sys.stdout.flush()


def relay(target: RunningHub, *, nbytes: int) -> tuple[float, float]:
    """Return MB/s by the wall clock, and per second of the hub's processor time."""
    count = nbytes // CHUNK_BYTES
    total = count * CHUNK_BYTES
    command = [sys.executable, "-m", "bench.hub", "--receive", target.url, target.token, str(total)]
    piece = bytes(CHUNK_BYTES)
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver,
        connect(target.url, make_hello("bench/w0", target.token)) as link,
    ):
        assert receiver.stdout is not None
        receiver.stdout.readline()
        cpu_s, started = target.cpu_s(), time.perf_counter()
        parts = ((b"", piece) for _ in range(count))
        link.relay_all("bench/reducer", parts, deadline=time.monotonic() + 10 * WAIT_S)
        receiver.stdout.readline()
        wall_s, cpu_s = time.perf_counter() - started, target.cpu_s() - cpu_s
    return total / MEGABYTE / wall_s, total / MEGABYTE / max(cpu_s, 0.01)


# ------------------------------------------------------------------------------------ main


def measure(effort: Effort) -> dict[str, float]:
    """Return every figure."""
    seconds = []
    for _ in range(effort.starts):
        with hub() as (_, ready_s):
            seconds.append(ready_s)
    found = {"ready_s": statistics.median(seconds)}
    with hub() as (target, _):
        time.sleep(1.0)  # whatever it does after its start is over
        found["rss_mb"] = target.rss_mb()
        memory = asyncio.run(memory_with_nodes(target, effort.node_counts))
        found |= {f"rss_mb_{count}_nodes": memory[count] for count in effort.node_counts}
    with hub() as (target, _):
        found |= asyncio.run(idle(target, nodes=effort.idle_nodes, seconds=effort.idle_s))
    with hub() as (target, _):
        found["messages_per_s"] = asyncio.run(throughput(target, seconds=effort.seconds))
        found["p99_ms"] = asyncio.run(latency(target, seconds=effort.seconds))
        found["puts_per_s"] = asyncio.run(durable(target, seconds=effort.seconds))
    with hub() as (target, _):
        found["relay_mb_s"], found["relay_mb_per_cpu_s"] = relay(target, nbytes=effort.relay_bytes)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure, or be the receiving end of a relay."""
    parser = argparse.ArgumentParser(prog="python -m bench.hub", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, under a minute")
    parser.add_argument("--receive", nargs=3, metavar=("URL", "TOKEN", "BYTES"), help="internal")
    given = parser.parse_args()
    if given.receive:
        url, token, nbytes = given.receive
        receive(url, token, int(nbytes))
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 1000 nodes are 1000 sockets
    found = measure(QUICK if given.quick else FULL)
    emit(found, [{"figure": name, "value": value} for name, value in found.items()])


if __name__ == "__main__":
    main()
