"""Where members run: hosts with shaped links, or this machine as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from bench.kit.cluster import ROOT
from bench.kit.ports import free_port
from bench.reduce import single_threaded

COORDINATOR = 0
"""The host of the hub, or of what others have in its place; members are on those after it."""

LINKS = ("20mbit/80ms", "100mbit/80ms", "unlimited")
"""Rate and round trip of every member's link; `unlimited` has neither."""

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Hosts(Protocol):
    """Machines of members and one for a coordinator."""

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        ...

    def free_port(self) -> int:
        """Return a port that is free on every host."""
        ...

    def environment(self) -> dict[str, str]:
        """Return the environment of programs."""
        ...

    def sent_bytes(self, host: int) -> int | None:
        """Return what a host has sent since the start, headers included; None: not known."""
        ...

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host. Options as of `Popen`."""
        ...

    def run(
        self, host: int, command: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host to its end. Options as of `subprocess.run`."""
        ...


class ThisMachine:
    """All members beside each other, over loopback; needs no privileges."""

    def address(self, host: int) -> str:
        """Return that of loopback."""
        return "127.0.0.1"

    def free_port(self) -> int:
        """Return a port that no process listens on."""
        return free_port()

    def environment(self) -> dict[str, str]:
        """Return an environment in which Gloo takes loopback, whatever this machine is called."""
        device = LOOPBACK.get(sys.platform, "")
        return common_environment() | ({"GLOO_SOCKET_IFNAME": device} if device else {})

    def sent_bytes(self, host: int) -> int | None:
        """Return nothing: loopback is everybody's."""
        return None

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command."""
        return subprocess.Popen(command, **options)

    def run(
        self, host: int, command: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command to its end."""
        return subprocess.run(command, check=options.pop("check", False), **options)


class LabHosts(Lab):
    """Network namespaces; Linux, as root."""

    def free_port(self) -> int:
        """Return a port of which a fresh namespace knows nothing."""
        return 29_500

    def environment(self) -> dict[str, str]:
        """Return the environment of programs."""
        return common_environment()

    def sent_bytes(self, host: int) -> int | None:
        """Return what went over the host's link."""
        return self.stats()[host].sent_bytes


def common_environment() -> dict[str, str]:
    """Return an environment of one thread in which programs find this package."""
    return single_threaded() | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@contextmanager
def lab_hosts(link: str, members: int) -> Iterator[LabHosts]:
    """Make a coordinator and so many members, whose links are as `LINKS` says."""
    rate, rtt = parsed(link)
    line: dict[str, str] = {"rate": rate} if rate else {}
    with LabHosts(hosts=members + 1, **line | ({"rtt": rtt} if rtt else {})) as lab:
        # Half of the round trip stays, so that from a member to the coordinator it is the whole.
        lab.shape(COORDINATOR, Shape(rtt_s=lab.shape_of(1).rtt_s))
        yield lab


def parsed(link: str) -> tuple[str, str]:
    """Return rate and round trip of a link; empty: no limit.

    Raises:
        ValueError: it is none.
    """
    if link == "unlimited":
        return "", ""
    found = re.fullmatch(r"(\d+[kmg]?bit)(?:/(\d+ms))?", link)
    if found is None:
        raise ValueError(f"{link!r} is no link: e.g. 20mbit/80ms, 1gbit, unlimited")
    return found[1], found[2] or ""
