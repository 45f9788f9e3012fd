"""The checks of `atoll doctor`: this machine and its hub."""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.cli import hub_access
from atoll.cli.hub_access import KnownHub
from atoll.cli.planning.lines_of_hub import links_between
from atoll.cli.views import screen
from atoll.errors import AtollError, ConfigError
from atoll.fleet.fleet import Fleet, few
from atoll.fleet.measured import fleet_of_nodes
from atoll.fleet.reading import unmeasured
from atoll.node.launchers import landlock, sandbox
from atoll.node.machine import probe
from atoll.node.machine.accelerators import computes_on, why_idle
from atoll.node.machine.probe import Compute

NEEDED_PYTHON = (3, 11)
NEEDED_DISK_BYTES = 2 * 10**9
MAX_CLOCK_OFFSET_S = 5.0
"""Leases and deadlines use monotonic clocks; wall clocks only order records."""

SLOW_BPS = 1e6
"""Below this a round of a small model takes minutes."""

SLOW_GFLOPS = 1.0
"""One core of a laptop of 2015 does 20 or more; below this other programs use the processor."""

TRIAL_BYTES = 4 * 2**20

ANSWER_S = 20.0
"""A hub that has not answered by then is taken for absent; one on a busy machine takes seconds."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None
    """None: skipped, or only a remark."""
    text: str
    remedy: str = ""
    needed: bool = True
    """Whether Atoll cannot work without it."""


def run_checks(where: str, *, home: Path, port: int) -> Iterator[Check]:
    """Yield the checks as they are done.

    Args:
        where: Ticket or URL of the hub; empty: the last one used, if any.
        home: Atoll's folder on this machine.
        port: The port a hub would listen on.
    """
    yield check_python()
    yield check_torch()
    yield check_port(port)
    yield check_disk(home)
    yield check_sandbox()
    hub, found = find_hub(where, home=home)
    yield found
    if hub is not None:
        yield from check_hub(hub)
        yield from check_lines(hub)
    compute = probe.measure_compute()
    yield check_matmul(compute)
    yield check_device(compute)


def check_python() -> Check:
    """Check the Python version."""
    good = sys.version_info >= NEEDED_PYTHON
    needed = ".".join(map(str, NEEDED_PYTHON))
    return Check("Python", good, platform.python_version(), f"install Python {needed} or newer")


def check_torch() -> Check:
    """Check that torch is installed, without loading it."""
    version = probe.torch_version()
    return Check(
        "torch",
        bool(version),
        version or "not installed: this machine can be a hub, but cannot train",
        "pip install 'atoll[train]'",
    )


def check_port(port: int) -> Check:
    """Check that a hub could listen on its usual port."""
    why = _why_taken(port)
    if why:
        remedy = "only a hub needs this port; use another one with atoll hub --port"
        return Check("port", None, f"{port} is taken ({why})", remedy, needed=False)
    return Check("port", True, f"{port} is free for a hub", needed=False)


def _why_taken(port: int) -> str:
    """Return why a hub could not listen on a port; empty: it could."""
    place = ("127.0.0.1", port)
    # macOS lets a program bind this address while another one listens on 0.0.0.0.
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=1.0):
        return "a program answers there"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        # On Windows SO_REUSEADDR would share a port that another program has.
        option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        trial.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            trial.bind(place)
        except OSError as error:
            return str(error.strerror)
    return ""


def check_disk(home: Path) -> Check:
    """Check the free space where Atoll keeps its state."""
    free = shutil.disk_usage(probe.existing(home)).free
    return Check(
        "disk",
        free >= NEEDED_DISK_BYTES,
        f"{screen.size(free)} free at {home}",
        f"free some space ({screen.size(NEEDED_DISK_BYTES)} are wanted), or set ATOLL_HOME",
    )


def check_sandbox() -> Check:
    """Report what the sandbox of jobs can isolate on this machine."""
    possible = bool(landlock.version())
    text = f"{sandbox.level()} (`sandbox` in the policy)"
    remedy = "to lend this machine to others, allow containers only: docs/operate/policy.md"
    return Check("sandbox", True if possible else None, text, remedy, needed=False)


def find_hub(where: str, *, home: Path) -> tuple[KnownHub | None, Check]:
    """Find the hub and check that it answers; no hub is fine if none was named."""
    try:
        hub = hub_access.find(where, home=home)
        with hub.client(timeout_s=ANSWER_S) as client:
            started = time.perf_counter()
            client.health()
            took_s = time.perf_counter() - started
            client.hub()
    except AtollError as error:
        if error.exit_code == 2 and not where:
            return None, Check(
                "hub", None, "no hub is known on this machine yet", "atoll hub, or atoll join"
            )
        return None, _failed("hub", error, remedy="is it running? atoll hub", needed=True)
    return hub, Check("hub", True, f"{hub.url} answers in {took_s * 1000:.0f} ms")


def _failed(name: str, error: AtollError, *, remedy: str = "", needed: bool = False) -> Check:
    """Return the check that a request to the hub did not succeed."""
    text = error.what + (f" ({error.given})" if error.given else "")
    return Check(name, False, text, error.remedy or remedy, needed=needed)


def check_hub(hub: KnownHub) -> Iterator[Check]:
    """Check clock and bandwidth against a hub that answers."""
    with hub.client(timeout_s=60.0) as client:
        try:
            before = time.time()
            theirs = client.hub().get("time")
            after = time.time()
        except AtollError as error:
            yield _failed("clock", error)
        else:
            if theirs is not None:
                offset = float(theirs) - (before + after) / 2
                # The hub told its time at some moment in between: a slow answer is no wrong clock.
                good = abs(offset) <= MAX_CLOCK_OFFSET_S + (after - before) / 2
                text = f"{offset:+.2f} s against the hub's"
                yield Check("clock", good, text, "set the clock: switch on NTP", needed=False)
        for name, measure in (("download", client.download_bps), ("upload", client.upload_bps)):
            try:
                speed = measure(TRIAL_BYTES)
            except AtollError as error:
                yield _failed(name, error)
                continue
            remedy = "use outer = diloco with a large `every`, and codec = int8"
            text = f"{speed / 1e6:.1f} Mbit/s with the hub"
            yield Check(name, speed >= SLOW_BPS, text, remedy, needed=False)


def check_lines(hub: KnownHub) -> Iterator[Check]:
    """Look at what a plan needs of all machines at the hub, and name the weakest hop."""
    try:
        with hub.client() as client:
            rows = client.nodes()
    except AtollError as error:
        yield _failed("lines", error)
        return
    try:
        fleet = fleet_of_nodes(rows, links=links_between(hub.url, rows))
    except ConfigError:
        return  # no machine is online: nothing to compare
    yield from check_fleet_figures(fleet)


def check_fleet_figures(fleet: Fleet) -> Iterator[Check]:
    """Name the slowest hop of a fleet, the farthest, and what was not measured."""
    for what, names in unmeasured(fleet).items():
        text = f"{few(names)}: {what} was not measured yet"
        yield Check("plan", None, text, UNMEASURED[what], needed=False)
    hops = [*_hub_hops(fleet), *_node_hops(fleet)]
    if len(fleet) > 1 and not fleet.links:
        text = "lines between the machines were not measured: plans take the relay for them"
        yield Check("lines", None, text, "atoll plan fleet --lines 0.5", needed=False)
    if not hops:
        return
    rate, name = min(hops)
    text = f"the weakest hop of {len(hops)}: {name}, {rate:.1f} Mbit/s"
    far_ms, far = max((machine.latency_ms, machine.name) for machine in fleet.machines)
    text += f"; the farthest machine: {far}, {far_ms:.0f} ms" if far_ms else ""
    good = rate * 1e6 >= SLOW_BPS
    yield Check("lines", good, text, "a plan without it: atoll plan JOB.toml", needed=False)


UNMEASURED = {
    "the speed": "install torch there (pip install 'atoll[train]') and start `atoll join` again",
    "the line to the hub": "it is measured a minute after the node has started",
    "the memory": "write it into a file of machines: atoll plan fleet > fleet.toml",
}


def _hub_hops(fleet: Fleet) -> Iterator[tuple[float, str]]:
    for machine in fleet.machines:
        if machine.up_mbps and machine.down_mbps:
            yield machine.up_mbps, f"{machine.name} to the hub"
            yield machine.down_mbps, f"the hub to {machine.name}"


def _node_hops(fleet: Fleet) -> Iterator[tuple[float, str]]:
    for link in fleet.links:
        if link.mbps:
            yield link.mbps, f"{link.ends[0]} to {link.ends[1]}"


def check_matmul(found: Compute) -> Check:
    """Show the speed of matrix multiplication, measured in a separate process."""
    if found.error:
        return Check("matmul", None, found.error, "see torch above", needed=False)
    gpu = f", {found.gpu}" if found.gpu else ""
    fast = found.gflops >= SLOW_GFLOPS
    text = f"{screen.gflops(found.gflops)} in fp32{gpu}"
    text += "" if fast else ": very slow, the machine is probably busy"
    remedy = "end what else computes here, then run atoll doctor again"
    return Check("matmul", True if fast else None, text, remedy, needed=False)


def check_device(found: Compute) -> Check:
    """Name the device of jobs, its memory and its use, or say why an accelerator is idle."""
    gpus = probe.Gpus()
    idle = why_idle(found, gpus)
    if idle is not None:
        return Check(
            "device", None, f"{idle.what} is idle: {idle.reason}", idle.remedy, needed=False
        )
    text = f"jobs compute on: {computes_on(found) or 'not tried'}"
    figures = gpus.figures()
    if figures:
        used = screen.size(int(figures["gpu_memory_used_bytes"]))
        text += f", {figures['gpu_percent']:.0f} % busy, {used} in use"
    return Check("device", True, text, needed=False)
