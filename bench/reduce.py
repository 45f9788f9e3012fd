"""Times one reduce of 40 MB: both routes, three codecs, beside plain Gloo.

    python -m bench.reduce [--quick]
    python -m bench.reduce --encryption [--rate 1gbit] [--rtt 0.5ms] [--quick]    as root

Everything is real: a hub process, its reducer process, one process per member with one thread
each, all on this machine, over loopback. `seconds` is the slowest member's reduce, the median of
the rounds; join and commit are left out. `cpu_seconds` and `bytes` are one member's mean; those
of the hub and the reducer are not in them. `relative_error` is that of the whole mean against
float64.

`--encryption` compares the direct route of two members with `encryption` on and off, each in a
network namespace of its own behind a line of this rate, fp32, by turns: {plain, encrypted} are
medians of seconds, `ratio` that of the rounds' quotients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from atoll.codec.registry import make_codec
from atoll.config.environment import LARGE_PAGES
from atoll.group.hub import HubGroup
from atoll.group.period import PeriodReport
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.rendezvous_store import RendezvousStore
from atoll.ids import session_id
from atoll.net.endpoint import parse_ticket
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from atoll.netlab.lab import Lab
from atoll.wire.messages import (
    Finished,
    Launch,
    NodeInfo,
    QueueAck,
    QueueClaim,
    QueueItems,
    unpack_command,
)
from bench.kit.report import emit

ELEMENTS = 10_000_000
CODECS = ["fp32", "bf16", "int8"]
PLAIN = "plain gloo"
WAIT_S = 300.0

SPEC = """
[job]
name = "bench"
nodes = {nodes}
route = "{route}"
encryption = "{encryption}"
[train]
steps = 1
"""


@dataclass(frozen=True)
class Timing:
    """What one member measured for one codec."""

    codec: str
    seconds: list[float]
    cpu_seconds: list[float]
    bytes: int
    relative_error: float


# ------------------------------------------------------------------------------- a member


def member_values(slot: int) -> torch.Tensor:
    """Return a member's vector: like a pseudo-gradient, normal with deviation 1e-3."""
    generator = torch.Generator().manual_seed(slot)
    return torch.randn(ELEMENTS, generator=generator).mul_(1e-3)


def exact_mean(n: int) -> torch.Tensor:
    total = torch.zeros(ELEMENTS, dtype=torch.float64)
    for slot in range(n):
        total += member_values(slot)
    return total / n


def error_of(found: torch.Tensor, exact: torch.Tensor | None) -> float:
    if exact is None:
        return 0.0
    return float((found.double() - exact).norm() / exact.norm())


def be_member(options: argparse.Namespace) -> None:
    """Run one member; the last line of its output is JSON."""
    torch.set_num_threads(1)
    link = connect(options.hub, make_hello(session_id(options.job, options.member), options.token))
    group = HubGroup(
        link, job=options.job, member=options.member, hub=options.hub, route=options.route
    )
    slot = group.register().slot
    mine = member_values(slot)
    exact = exact_mean(options.members) if slot == 0 else None  # one member checks for all
    codecs = options.codecs.split(",")
    timings = [time_codec(group, mine, exact, codec, options.rounds) for codec in codecs]
    if options.route == "direct" and codecs == CODECS:
        timings.append(time_plain(group, mine, exact, options.rounds))
    sys.stdout.write(json.dumps([asdict(timing) for timing in timings]) + "\n")
    sys.stdout.flush()
    link.close(Finished(ok=True))
    group.close()
    os._exit(0)  # Gloo's threads need no farewell


def time_codec(
    group: HubGroup, mine: torch.Tensor, exact: torch.Tensor | None, name: str, rounds: int
) -> Timing:
    """Time one codec; the first round warms up and is not counted."""
    codec, seconds, cpu, nbytes = make_codec(name), [], [], 0
    for _ in range(rounds + 1):
        group.join(PeriodReport(group.committed_round, "base"))
        began, busy = time.perf_counter(), time.process_time()
        reduced = group.reduce([mine], codec=codec, weight=1.0).wait()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
        nbytes = reduced.sent_bytes + reduced.received_bytes
        group.commit(reduced)
    error = error_of(reduced.tensors[0], exact)
    return Timing(codec.spec, seconds[1:], cpu[1:], nbytes, error)


def time_plain(
    group: HubGroup, mine: torch.Tensor, exact: torch.Tensor | None, rounds: int
) -> Timing:
    """Time torch.distributed's own all-reduce among the same members."""
    dist: Any = torch.distributed
    plan = group.join(PeriodReport(group.committed_round, "base"))
    host, _, _ = plan.store.rpartition(":")
    timeout = timedelta(seconds=60)
    assert group.registered is not None
    store = RendezvousStore(
        plan.store, "plain", lines=MemberLines(group.registered.key, me=group.me),
        deadline=time.monotonic() + timeout.total_seconds(),
    )  # fmt: skip
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    n = len(plan.members)
    gloo = dist.ProcessGroupGloo(store, plan.members.index(group.me), n, options)
    seconds, cpu = [], []
    for _ in range(rounds + 1):
        x = mine.clone()
        gloo.barrier().wait()
        began, busy = time.perf_counter(), time.process_time()
        gloo.allreduce([x]).wait()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    error = error_of(x.div_(n), exact)
    group.commit(None, ok=False, reason="only a meeting point")
    nbytes = round(2 * 2 * (n - 1) / n * 4 * ELEMENTS)
    return Timing("fp32", seconds[1:], cpu[1:], nbytes, error)


# ----------------------------------------------------------------------------- the driver


@contextlib.contextmanager
def running_hub(folder: Path, *options: str) -> Iterator[dict[str, str]]:
    """Run a hub process and give what it prints when it is ready."""
    command = [sys.executable, "-m", "atoll.hub", *options]
    command += ["--data", str(folder / "data"), "--jobs", str(folder / "jobs")]
    hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=single_threaded())
    try:
        assert hub.stdout is not None
        yield json.loads(hub.stdout.readline())
    finally:
        hub.terminate()
        hub.wait(20)


def single_threaded() -> dict[str, str]:
    """Return the environment of a process with one thread, otherwise as workers have it."""
    return {**os.environ, **LARGE_PAGES, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Node:
    """Takes the hub's commands as a node agent does."""

    def __init__(self, hub: dict[str, str]) -> None:
        """Join the hub."""
        self._hub = hub
        info = NodeInfo(hostname="bench", system="", python="", atoll="", torch="", slots=256)
        with HubClient(hub["url"]) as client:
            secret = parse_ticket(hub["ticket"]).secret
            self._name, token, _ = client.join(secret, name="bench", info=info)
        self._link = connect(hub["url"], make_hello(self._name, token, info=info))

    def submit(
        self, *, nodes: int, route: str, encryption: str = "on"
    ) -> tuple[str, dict[str, str]]:
        """Return a new job and its members' tokens."""
        with HubClient(self._hub["url"], self._hub["operator_token"]) as client:
            job = client.submit(SPEC.format(nodes=nodes, route=route, encryption=encryption))
        queue, tokens = f"node/{self._name}", dict[str, str]()
        while len(tokens) < nodes:
            claim = QueueClaim(queue=queue, lease_s=60, limit=16, wait_s=5.0)
            reply = self._link.request(claim, timeout_s=30)
            assert isinstance(reply, QueueItems)
            for item in reply.items:
                command = unpack_command(item.payload)
                if isinstance(command, Launch) and command.job == job:
                    tokens[command.member] = command.token
                self._link.request(QueueAck(queue=queue, lease=item.lease), timeout_s=30)
        return job, tokens

    def end(self, job: str) -> None:
        """Stop a job: its reducer ends, too."""
        with HubClient(self._hub["url"], self._hub["operator_token"]) as client:
            client.stop(job, grace_s=0.0)

    def close(self) -> None:
        """Leave."""
        self._link.close()


def measure(
    node: Node, hub: dict[str, str], *, route: str, members: int, rounds: int
) -> list[dict[str, Any]]:
    """Run one job's members as processes and return its rows."""
    job, tokens = node.submit(nodes=members, route=route)
    reports = run_members(hub, job, tokens, route=route, rounds=rounds)
    return [
        row_of(route if index < len(CODECS) else PLAIN, members, list(timings))
        for index, timings in enumerate(zip(*reports, strict=True))
    ]


def run_members(
    hub: dict[str, str], job: str, tokens: dict[str, str], *, route: str, rounds: int,
    lab: Lab | None = None,
) -> list[list[Timing]]:  # fmt: skip
    """Run a job's members as processes, each on a host of the lab, if any; return their timings."""
    processes, members = [], len(tokens)
    for host, (member, token) in enumerate(sorted(tokens.items()), start=1):
        command = [sys.executable, "-m", "bench.reduce", "--member", member]
        command += [f"--token={token}"]  # it may begin with a dash
        command += ["--hub", hub["url"], "--job", job, "--route", route]
        command += ["--members", str(members), "--rounds", str(rounds)]
        if lab is not None:
            command = lab.argv(host, [*command, "--codecs", "fp32"])
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=single_threaded())
        )
    try:
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [[Timing(**entry) for entry in json.loads(out.splitlines()[-1])] for out in outputs]


def compare_encryption(name: str, *, turns: int, rounds: int) -> dict[str, Any]:
    """Return what encryption costs; runs on host 0 of a lab, the members on hosts 1 and 2."""
    lab = Lab.attach(name)
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    cpu: dict[str, list[float]] = {"off": [], "on": []}
    options = ("--host", lab.address(0), "--tls", "off")
    with tempfile.TemporaryDirectory() as folder, running_hub(Path(folder), *options) as hub:
        node = Node(hub)
        for turn in range(turns):
            for encryption in sorted(seconds, reverse=turn % 2 == 1):
                job, tokens = node.submit(nodes=2, route="direct", encryption=encryption)
                reports = run_members(hub, job, tokens, route="direct", rounds=rounds, lab=lab)
                slowest = [
                    max(times) for times in zip(*(r[0].seconds for r in reports), strict=True)
                ]
                seconds[encryption].append(statistics.median(slowest))
                cpu[encryption] += [value for r in reports for value in r[0].cpu_seconds]
        node.close()
    quotients = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "plain": round(statistics.median(seconds["off"]), 3),
        "encrypted": round(statistics.median(seconds["on"]), 3),
        "ratio": round(statistics.median(quotients), 3),
        "turns": [round(quotient, 3) for quotient in quotients],
        "cpu_plain": round(statistics.median(cpu["off"]), 3),
        "cpu_encrypted": round(statistics.median(cpu["on"]), 3),
    }


def row_of(route: str, members: int, timings: list[Timing]) -> dict[str, Any]:
    """Return one line of the result from all members' timings."""
    slowest = [max(times) for times in zip(*(t.seconds for t in timings), strict=True)]
    return {
        "route": route,
        "codec": timings[0].codec,
        "members": members,
        "seconds": statistics.median(slowest),
        "cpu_seconds": statistics.mean(statistics.median(t.cpu_seconds) for t in timings),
        "bytes": round(statistics.mean(t.bytes for t in timings)),
        "relative_error": timings[0].relative_error,
    }


def main() -> int:
    """Measure everything, or be one member of a measurement."""
    parser = argparse.ArgumentParser(prog="python -m bench.reduce", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; under a minute")
    for name in ("--member", "--token", "--hub", "--job", "--route"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--members", "--rounds"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--codecs", default=",".join(CODECS), help=argparse.SUPPRESS)
    parser.add_argument("--in-lab", default="", help=argparse.SUPPRESS)
    parser.add_argument("--encryption", action="store_true", help="what it costs on a line")
    parser.add_argument("--rate", default="1gbit", help="of the line")
    parser.add_argument("--rtt", default="0.5ms", help="its round trip")
    options = parser.parse_args()
    if options.member:
        be_member(options)
    if options.in_lab:
        turns, rounds = (1, 3) if options.quick else (5, 5)
        found = compare_encryption(options.in_lab, turns=turns, rounds=rounds)
        emit(found, [found])
        return 0
    if options.encryption:
        with Lab(hosts=3, rate=options.rate, rtt=options.rtt) as lab:
            command = [sys.executable, "-m", "bench.reduce", "--in-lab", lab.name]
            return lab.popen(0, command + ["--quick"] * options.quick).wait()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, running_hub(Path(folder)) as hub:
        node = Node(hub)
        for members in (2, 4):
            for route in ("direct", "relay"):
                rounds = 3 if options.quick else 9
                rows += measure(node, hub, route=route, members=members, rounds=rounds)
        node.close()
    emit({"rows": rows}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
