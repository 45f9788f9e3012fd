"""What an island over two machines costs: `python -m bench.machines`, one JSON object on stdout.

The same two ranks twice, in processes that live at the same time and take turns: both on one host
of the network lab, and on two hosts with a line of `--rate` and `--rtt` between them. `ratio` is
the median over pairs of segments of the seconds of a step over two hosts divided by those on one;
`sent_mib` is what the first host sends per step, `line_ms` how long that alone takes on the line,
`line_mbit` what a plain stream of bytes reaches on it. The hosts, and the process that is the line
between them, share the processors of one machine: two machines compute faster than this.
Needs root and network namespaces (Linux).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from atoll.config import RankPlace, rank_environment, rank_place
from atoll.netlab.lab import Lab
from bench.island.kinds import KINDS, Kind
from bench.kit.report import emit

CHOSEN = ("ddp", "fsdp", "tensor", "pipeline, 1f1b")
PORTS = {"one": 29_501, "two": 29_502}
STREAM_PORT, STREAM_BYTES = 29_503, 64 * 2**20

SINK = f"""
import socket
server = socket.create_server(("", {STREAM_PORT}))
print("ready", flush=True)
connection = server.accept()[0]
while connection.recv(1 << 20):
    pass
connection.sendall(b"x")
"""
SOURCE = f"""
import socket, time
line = socket.create_connection(("h1", {STREAM_PORT}))
block, started = bytes(1 << 20), time.perf_counter()
for _ in range({STREAM_BYTES} >> 20):
    line.sendall(block)
line.shutdown(socket.SHUT_WR)
line.recv(1)
print({STREAM_BYTES} * 8 / (time.perf_counter() - started) / 1e6)
"""


def be_rank(kind: Kind) -> None:
    """Be a rank; the first one does as many steps as each line of its input says."""
    import torch

    from atoll.group.single import SingleGroup
    from atoll.island.command_broadcaster import CommandBroadcaster
    from atoll.island.world import build_mesh, world
    from atoll.train.build import build
    from atoll.train.island.island_trainer import TrainerIsland
    from bench.island.rank import batches, spec_of

    torch.set_num_threads(1)
    place = cast(RankPlace, rank_place())
    device, spec, data = torch.device("cpu"), spec_of(kind), batches()
    with TemporaryDirectory() as folder, world(place, device=device, timeout_s=300.0):
        mesh = build_mesh(spec.mesh, device=device)
        broadcaster = CommandBroadcaster(rank=place.rank, ranks=place.ranks)
        island = TrainerIsland(spec, broadcaster, mesh=mesh, device=device)
        if not place.leads:
            broadcaster.serve()
            return
        built = build(spec, member="w0", slot=0, num_slots=1)
        island.settle(built, folder=Path(folder))
        inner, outer, task = island.inner(), built.outer, built.task
        outer.setup(task, group=SingleGroup(), codec=built.codec)
        for line in sys.stdin:
            started = time.perf_counter()
            for step in range(int(line)):
                inner.step(task, data[step % len(data)], outer)
            sys.stdout.write(f"{time.perf_counter() - started}\n")
            sys.stdout.flush()
        broadcaster.end()


class Pair:
    """Two ranks, started on one host or on two."""

    def __init__(self, lab: Lab, kind: Kind, *, hosts: tuple[int, int], port: int) -> None:
        on_one = hosts[0] == hosts[1]
        address = "127.0.0.1" if on_one else lab.address(hosts[0])
        self.started: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(hosts):
            place = RankPlace(rank, 2, rank if on_one else 0, address, port, 2 if on_one else 1)
            environment = rank_environment(
                place, defaults={}, OMP_NUM_THREADS="1",
                GLOO_SOCKET_IFNAME="lo" if on_one else "eth0",
            )  # fmt: skip
            self.started.append(
                lab.popen(
                    host,
                    [sys.executable, "-m", "bench.machines", "--be", kind.name],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def seconds_of(self, steps: int) -> float:
        """Return how long so many steps take."""
        first = self.started[0]
        if first.stdin is None or first.stdout is None:
            raise RuntimeError("the first rank has no pipes")
        first.stdin.write(f"{steps}\n")
        first.stdin.flush()
        return float(first.stdout.readline())

    def close(self) -> None:
        """Let the ranks go home; end those that do not."""
        for popen in self.started:
            if popen.stdin is not None:
                popen.stdin.close()
        for popen in self.started:
            try:
                popen.wait(timeout=20)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
            if popen.stdout is not None:
                popen.stdout.close()


@contextmanager
def pair(lab: Lab, kind: Kind, *, hosts: tuple[int, int], port: int) -> Iterator[Pair]:
    made = Pair(lab, kind, hosts=hosts, port=port)
    try:
        yield made
    finally:
        made.close()


def measure(lab: Lab, kind: Kind, *, pairs: int, segment_s: float) -> dict[str, Any]:
    """Return the row of a kind."""
    with ExitStack() as stack:
        sides = {
            "one": stack.enter_context(pair(lab, kind, hosts=(0, 0), port=PORTS["one"])),
            "two": stack.enter_context(pair(lab, kind, hosts=(0, 1), port=PORTS["two"])),
        }
        for side in sides.values():
            side.seconds_of(3)
        steps = max(2, round(3 * segment_s / sides["two"].seconds_of(3)))
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        turns, sent = list(sides), 0
        for _ in range(pairs):
            for name in turns:
                before = lab.stats()[0].sent_bytes
                seconds[name].append(sides[name].seconds_of(steps) / steps)
                sent += (lab.stats()[0].sent_bytes - before) * (name == "two")
            turns.reverse()
    ratios = [two / one for one, two in zip(seconds["one"], seconds["two"], strict=True)]
    per_step = sent / (pairs * steps)
    return {
        "inner": kind.name,
        "one_host_ms": round(1e3 * statistics.median(seconds["one"]), 1),
        "two_hosts_ms": round(1e3 * statistics.median(seconds["two"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "sent_mib": round(per_step / 2**20, 2),
        "line_ms": round(1e3 * per_step * 8 / lab.shape_of(0).up_bps, 1),
        "pairs": [round(ratio, 3) for ratio in ratios],
        "steps_per_segment": steps,
    }


def line_mbit(lab: Lab) -> float:
    """Return what a plain stream of bytes reaches between the two hosts."""
    sink = lab.popen(1, [sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    try:
        if sink.stdout is not None:
            sink.stdout.readline()
        done = lab.run(0, [sys.executable, "-c", SOURCE], capture_output=True, text=True)
        return round(float(done.stdout))
    finally:
        sink.kill()
        sink.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the line between the hosts")
    parser.add_argument("--rtt", default="0.5ms", help="its round trip")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter segments")
    parser.add_argument("--be", default="", help=argparse.SUPPRESS)
    words = parser.parse_args()
    kinds = {kind.name: kind for kind in KINDS}
    if words.be:
        be_rank(kinds[words.be])
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads may abort the process while it is taken apart
    pairs, segment_s = (3, 0.5) if words.quick else (9, 1.0)
    rows = []
    with Lab(hosts=2, rate=words.rate, rtt=words.rtt) as lab:
        line = line_mbit(lab)
        for name in CHOSEN:
            if words.only in name:
                sys.stderr.write(f"{name} ...\n")
                rows.append(measure(lab, kinds[name], pairs=pairs, segment_s=segment_s))
    shown = ("inner", "one_host_ms", "two_hosts_ms", "ratio", "sent_mib", "line_ms")
    result = {"rate": words.rate, "rtt": words.rtt, "line_mbit": line, "rows": rows}
    emit(result, [{name: row[name] for name in shown} for row in rows])


if __name__ == "__main__":
    main()
