"""What idle nodes cost a hub: `python -m bench.idle [--nodes 5000] [--quick] [--tls]`.

    idle_nodes      nodes that were connected, heartbeats every two seconds, at the end
    kb_per_node     resident memory of the hub per node, beyond a hub without any, in kB
    core_share      share of one core that the hub used while nothing but heartbeats came
    beats_per_s     heartbeats answered per second meanwhile
    beat_p99_ms     99th percentile of a heartbeat's round trip
    connect_s       time until all were connected and welcomed

The nodes are bare WebSocket connections in one client process; the hub is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time

from atoll.net.endpoint import HubEndpoint
from atoll.net.handshake import greet, make_hello
from atoll.net.transport import Transport
from atoll.net.websocket import dial
from atoll.wire.limits import HEARTBEAT_S
from atoll.wire.messages import Beat, NodeInfo, pack
from bench.kit.hub_process import MEGABYTE, RunningHub, hub
from bench.kit.report import emit

AT_ONCE = 50
SETTLE_S = 4.0
STATS = {
    "cpu_percent": 12.5,
    "memory_percent": 40.0,
    "memory_free_bytes": 8e9,
    "load": 0.3,
    "latency_ms": 12.0,
}


async def idle(target: RunningHub, *, nodes: int, seconds: float) -> dict[str, float]:
    """Connect nodes, let them beat for some time, and return the figures."""
    await asyncio.sleep(1.0)  # whatever the hub does after its start is over
    empty_mb = target.rss_mb()
    started = time.perf_counter()
    transports: list[Transport] = []
    while len(transports) < nodes:
        some = range(len(transports), min(nodes, len(transports) + AT_ONCE))
        transports += await asyncio.gather(*(enter(target, number) for number in some))
    connect_s = time.perf_counter() - started
    trips: list[float] = []
    end = time.perf_counter() + SETTLE_S + seconds + HEARTBEAT_S
    beating = [
        asyncio.create_task(beat(transport, end, trips, number / nodes * HEARTBEAT_S))
        for number, transport in enumerate(transports)
    ]
    await asyncio.sleep(SETTLE_S)
    trips.clear()
    cpu_s, since = target.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    wall_s = time.perf_counter() - since
    cpu_s, count = target.cpu_s() - cpu_s, len(trips)
    loaded_mb = target.rss_mb()
    alive = sum(not task.done() for task in beating)
    await asyncio.gather(*beating)
    await asyncio.gather(*(transport.close() for transport in transports))
    return {
        "idle_nodes": float(alive),
        "kb_per_node": (loaded_mb - empty_mb) * MEGABYTE / 1e3 / nodes,
        "core_share": cpu_s / wall_s,
        "beats_per_s": count / wall_s,
        "beat_p99_ms": statistics.quantiles(trips, n=100)[98] * 1e3,
        "connect_s": connect_s,
        "rss_mb_empty": empty_mb,
    }


async def enter(target: RunningHub, number: int) -> Transport:
    """Return the connection of one node after its greeting."""
    transport = await dial(target.url, endpoint=HubEndpoint(ca=target.ca))
    info = NodeInfo(f"lap{number}", "Linux x86_64", "3.11.7", "0.1.0", cores=8)
    hello = make_hello(f"lap{number}", target.token, info=info)
    await greet(transport, hello, id=1)
    return transport


async def beat(transport: Transport, end: float, trips: list[float], first_s: float) -> None:
    """Send a heartbeat every two seconds, as nodes do."""
    await asyncio.sleep(first_s)
    id_ = 1
    while (now := time.perf_counter()) < end:
        id_ += 1
        await transport.send(pack(Beat(STATS, time.time()), id=id_))
        await transport.receive()
        trips.append(time.perf_counter() - now)
        await asyncio.sleep(max(0.0, now + HEARTBEAT_S - time.perf_counter()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5_000)
    parser.add_argument("--quick", action="store_true", help="1000 nodes, 5 seconds")
    parser.add_argument("--tls", action="store_true", help="sessions over TLS")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nodes, seconds = (1_000, 5.0) if given.quick else (given.nodes, 20.0)
    with hub("--tls", "on" if given.tls else "off") as (target, _):
        found = asyncio.run(idle(target, nodes=nodes, seconds=seconds))
    rounded = {name: round(value, 3) for name, value in found.items()}
    emit(rounded, [{"figure": name, "value": value} for name, value in rounded.items()])


if __name__ == "__main__":
    main()
