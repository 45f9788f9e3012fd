"""Whether slow readers can fill the hub's memory: `python -m bench.relay [--quick]`.

    rss_growth_mb       how much the hub's resident memory grew, at most, while 50 senders streamed
                        to 50 readers of which 5 were stopped (SIGSTOP)
    relay_mb_s          payload that the other readers got meanwhile, per second
    stopped_mb          what senders could hand over for the five that did not read

Each pair of sender and reader has its own window of credit, so a reader that stands still holds up
its own sender only. The hub, the senders and the readers are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from atoll.errors import AtollError
from atoll.net.handshake import greet, make_hello
from atoll.net.sync_link import open_link
from atoll.net.websocket import dial
from atoll.wire.limits import CHUNK_BYTES
from bench.kit.hub_process import MEGABYTE, WAIT_S, RunningHub, hub
from bench.kit.report import emit

READERS = 50
STOPPED = 5
PROCESSES = 5
"""Of readers, ten in each; the first holds those that are stopped, and no other."""


async def read(url: str, token: str, numbers: range) -> None:
    """Be some readers until this process is ended."""

    async def reader(number: int) -> None:
        transport = await dial(url)
        await greet(transport, make_hello(f"bench/r{number}", token), id=1)
        while True:
            await transport.receive()

    tasks = [asyncio.create_task(reader(number)) for number in numbers]
    await asyncio.sleep(2.0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*tasks)


async def send(target: RunningHub, *, seconds: float) -> tuple[list[int], float, float]:
    """Stream to every reader; return the bytes sent to each, the seconds, and the peak growth."""
    links = await asyncio.gather(
        *(
            open_link(target.url, make_hello(f"bench/s{number}", target.token), timeout_s=WAIT_S)
            for number in range(READERS)
        )
    )
    sent = [0] * READERS
    before = peak = target.rss_mb()
    began = time.perf_counter()
    end = time.monotonic() + seconds
    piece = bytes(CHUNK_BYTES)

    async def stream(number: int) -> None:
        with contextlib.suppress(AtollError):  # a stopped reader: the deadline ends the wait
            while time.monotonic() < end:
                to = f"bench/r{number}"
                sent[number] += await links[number].relay(to, (b"", piece), deadline=end)

    tasks = [asyncio.create_task(stream(number)) for number in range(READERS)]
    while time.monotonic() < end:
        await asyncio.sleep(0.1)
        peak = max(peak, target.rss_mb())
    await asyncio.gather(*tasks)
    wall_s = time.perf_counter() - began
    await asyncio.gather(*(link.close() for link in links))
    return sent, wall_s, peak - before


@contextlib.contextmanager
def readers(target: RunningHub) -> Iterator[None]:
    """Run all readers, the first few of them stopped."""
    shares = [range(STOPPED)]
    step = (READERS - STOPPED) // (PROCESSES - 1)
    shares += [range(start, min(start + step, READERS)) for start in range(STOPPED, READERS, step)]
    with contextlib.ExitStack() as stack:
        running = []
        for share in shares:
            command = [sys.executable, "-m", "bench.relay", "--read", target.url, target.token]
            popen = subprocess.Popen(
                [*command, str(share.start), str(share.stop)], stdout=subprocess.PIPE, text=True
            )
            running.append(stack.enter_context(popen))
            stack.callback(popen.kill)
        for popen in running:
            assert popen.stdout is not None
            popen.stdout.readline()
        os.kill(running[0].pid, signal.SIGSTOP)
        yield


def main() -> None:
    """Measure, or be some of the readers."""
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five seconds instead of twenty")
    parser.add_argument(
        "--read", nargs=4, metavar=("URL", "TOKEN", "FIRST", "LAST"), help="internal"
    )
    given = parser.parse_args()
    if given.read:
        url, token, first, last = given.read
        asyncio.run(read(url, token, range(int(first), int(last))))
        return
    with hub() as (target, _), readers(target):
        sent, wall_s, growth_mb = asyncio.run(send(target, seconds=5.0 if given.quick else 20.0))
    found = {
        "rss_growth_mb": round(growth_mb, 1),
        "relay_mb_s": round(sum(sent[STOPPED:]) / MEGABYTE / wall_s, 1),
        "stopped_mb": round(sum(sent[:STOPPED]) / MEGABYTE, 1),
    }
    emit(found, [{"figure": name, "value": value} for name, value in found.items()])


if __name__ == "__main__":
    main()
