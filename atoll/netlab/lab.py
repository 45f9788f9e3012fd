"""Hosts on one machine with links as they are between homes.

with Lab(hosts=2, rate="20mbit", rtt="60ms") as lab:
    server = lab.popen(0, ["python3", "-m", "http.server"])
    lab.run(1, ["curl", "http://h0:8000"])
    lab.cut(1)
    lab.heal(1)
    print(lab.stats()[1].sent_bytes)
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from atoll.errors import ConfigError
from atoll.netlab import daemon, registry
from atoll.netlab.commands import LabError, ip, ip_batch, shell
from atoll.netlab.packets import mac_of
from atoll.netlab.shape import Between, Line, Shape, parse_shape
from atoll.netlab.switch import HostStats
from atoll.netlab.tap import DEVICE

NETWORK = "10.88.0"
MOST_HOSTS = 64
START_TIMEOUT_S = 15.0
SEGMENT_BYTES = 1514
MOST_SEGMENTS = 43
"""Segments that the kernel may hand over at once: 64 KiB."""

SETTINGS = "lab.json"


class Lab:
    """A set of hosts behind one switch. Labs with different names do not touch each other."""

    def __init__(self, *, hosts: int = 2, name: str = "", **line: Unpack[Line]) -> None:
        """Describe a lab whose hosts all have the same link; nothing is made before `start`.

        Args:
            hosts: How many, up to 64.
            name: Up to 12 letters and digits; random when empty.
            line: The link, e.g. `rate="20mbit", rtt="60ms"`.

        Raises:
            ConfigError: one of them is not what it should be.
        """
        if not 1 <= hosts <= MOST_HOSTS:
            raise ConfigError("this many hosts", given=hosts, expected=f"1 to {MOST_HOSTS}")
        self.name = name or "t" + secrets.token_hex(3)
        if not re.fullmatch(r"[a-z0-9]{1,12}", self.name):
            raise ConfigError(
                "the name of a lab is wrong", given=self.name, expected="1 to 12 of a-z 0-9"
            )
        self._shapes = [parse_shape(**line)] * hosts
        self._daemon: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, name: str) -> Lab:
        """Return a lab that another process has started and left up.

        Raises:
            LabError: there is none of this name.
        """
        try:
            text = (registry.folder_of(name) / SETTINGS).read_text(encoding="utf-8")
        except OSError as error:
            up = ", ".join(registry.all_labs()) or "none"
            raise LabError("there is no such lab", given=name, expected=f"one of: {up}") from error
        shapes = [Shape(**fields) for fields in json.loads(text)]
        lab = cls(hosts=len(shapes), name=name)
        lab._shapes = shapes
        return lab

    @staticmethod
    def unavailable() -> str | None:
        """Return why no lab can be made on this machine, or None when one can: it tries."""
        if sys.platform != "linux":
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "iproute2 is not installed"
        if not os.access(DEVICE, os.R_OK | os.W_OK):
            return f"{DEVICE} cannot be opened"
        try:
            with Lab(hosts=1):
                return None
        except (LabError, OSError) as error:
            return str(error)

    # ---------------------------------------------------------------------- start and end

    def start(self, *, guarded: bool = True) -> None:
        """Make the hosts.

        Args:
            guarded: Remove everything when this process ends, killed or not. Otherwise the lab
                stays up until `stop`, also of another process (see `attach`).

        Raises:
            LabError: this machine cannot, or the name is taken; nothing is left behind.
        """
        folder = registry.folder_of(self.name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise LabError(
                "a lab of this name is up already",
                given=self.name,
                remedy="choose another name, or stop that one",
            ) from None
        try:
            self._save()
            self._make_hosts()
            self._start_switch(guarded=guarded)
            for host in range(len(self._shapes)):
                self._plug_in(host)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process inside and remove the hosts. May be called at any time, and again."""
        process = self._daemon
        self._daemon = None
        if process is not None:
            process.kill()  # first, or its guard would do what comes next too
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        registry.remove(self.name)

    def __enter__(self) -> Self:
        """Start the lab; it is stopped at the end of the block."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # -------------------------------------------------------------------------------- use

    def __len__(self) -> int:
        return len(self._shapes)

    def address(self, host: int) -> str:
        """Return the IP address of a host; inside the lab its name is `h0`, `h1`, ..."""
        return f"{NETWORK}.{self._checked(host) + 1}"

    def argv(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command inside a host."""
        namespace = registry.host_namespace(self.name, self._checked(host))
        return ["ip", "netns", "exec", namespace, *command]

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command inside a host; its process id is its own. Options as of `Popen`."""
        return subprocess.Popen(self.argv(host, command), **options)

    def run(
        self, host: int, command: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command inside a host to its end. Options as of `subprocess.run`."""
        options.setdefault("check", False)
        return subprocess.run(self.argv(host, command), **options)

    def cut(self, host: int) -> None:
        """Pull the cable: packets from and to the host vanish without notice."""
        self._ask({"do": "cut", "host": self._checked(host), "cut": True})

    def heal(self, host: int) -> None:
        """Plug the cable in again."""
        self._ask({"do": "cut", "host": self._checked(host), "cut": False})

    def shape(self, host: int, shape: Shape) -> None:
        """Change the link of a host while everything runs."""
        self._shapes[self._checked(host)] = shape
        self._ask({"do": "shape", "host": host, "shape": dataclasses.asdict(shape)})
        for other in range(len(self._shapes)):
            self._limit_segments(other)
        self._save()

    def between(self, a: int, b: int, between: Between) -> None:
        """Set the path between two hosts, both ways, in place of their links."""
        fields = dataclasses.asdict(between)
        for one, other in ((self._checked(a), self._checked(b)), (b, a)):
            self._ask({"do": "between", "host": one, "to": other, "between": fields})

    def shape_of(self, host: int) -> Shape:
        """Return the present link of a host."""
        return self._shapes[self._checked(host)]

    def stats(self) -> list[HostStats]:
        """Return the totals of every host since the start."""
        return [HostStats(**fields) for fields in self._ask({"do": "stats"})]

    # --------------------------------------------------------------------------- building

    def _make_hosts(self) -> None:
        """Make the namespaces, and the names that their processes know."""
        ip("netns", "add", registry.switch_namespace(self.name))
        table = "".join(f"{self.address(h)} h{h}\n" for h in range(len(self._shapes)))
        own_name = socket.gethostname()
        for host in range(len(self._shapes)):
            namespace = registry.host_namespace(self.name, host)
            files = registry.HOST_FILES / namespace
            files.mkdir(parents=True)
            # The machine's own name must lead somewhere too: some programs look themselves up.
            text = f"127.0.0.1 localhost\n{self.address(host)} h{host} {own_name}\n{table}"
            (files / "hosts").write_text(text, encoding="utf-8", newline="\n")
            ip("netns", "add", namespace)
            shell(
                namespace,
                "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6;"
                "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save",
            )

    def _start_switch(self, *, guarded: bool) -> None:
        """Start the process of the switch and wait until its devices are there."""
        shapes = json.dumps([dataclasses.asdict(shape) for shape in self._shapes])
        command = [
            *("ip", "netns", "exec", registry.switch_namespace(self.name)),
            *(sys.executable, "-m", "atoll.netlab.daemon", "--name", self.name, "--shapes", shapes),
            *(["--guarded"] if guarded else []),
        ]
        log = registry.folder_of(self.name) / "switch.log"
        with log.open("wb") as errors:
            self._daemon = subprocess.Popen(
                command,
                cwd=Path(__file__).resolve().parents[2],
                stdin=subprocess.PIPE if guarded else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        stdout = self._daemon.stdout
        if stdout is None:
            raise LabError("the switch has no output")
        with stdout:
            ready, _, _ = select.select([stdout], (), (), START_TIMEOUT_S)
            if not ready or stdout.readline().decode().strip() != daemon.READY:
                said = log.read_text(encoding="utf-8", errors="replace").strip()
                raise LabError(
                    "the switch of the network lab did not start",
                    given=said.splitlines()[-1] if said else "it said nothing",
                )

    def _plug_in(self, host: int) -> None:
        """Give a host its end of the cable: an `eth0` with an address, and its neighbours."""
        namespace = registry.host_namespace(self.name, host)
        ip(
            *("link", "set", f"t{host}", "netns", namespace, "name", "eth0"),
            namespace=registry.switch_namespace(self.name),
        )
        others = [other for other in range(len(self._shapes)) if other != host]
        ip_batch(
            [
                "link set lo up",
                f"link set eth0 address {mac_of(host)} txqueuelen 10000",
                f"addr add {self.address(host)}/24 dev eth0",
                "link set eth0 up",
                *(
                    f"neigh replace {self.address(other)} lladdr {mac_of(other)} dev eth0"
                    " nud permanent"
                    for other in others
                ),
            ],
            namespace=namespace,
        )
        self._limit_segments(host)

    def _limit_segments(self, host: int) -> None:
        """Bound how much of a stream a host hands over as one packet: about 1 ms of its rate.

        A packet leaves a line as a whole, so a larger one would hold others up; and packets can
        get lost one by one only when they are single.
        """
        bps = self._shapes[host].up_bps
        segments = MOST_SEGMENTS
        if bps:
            segments = max(1, min(MOST_SEGMENTS, int(bps * 1e-3 / 8 / SEGMENT_BYTES)))
        if any(shape.loss for shape in self._shapes):
            segments = 1
        size = max(2, segments) * SEGMENT_BYTES
        ip(
            *("link", "set", "eth0", "gso_max_size", str(size), "gso_max_segs", str(segments)),
            namespace=registry.host_namespace(self.name, host),
        )

    def _save(self) -> None:
        text = json.dumps([dataclasses.asdict(shape) for shape in self._shapes])
        (registry.folder_of(self.name) / SETTINGS).write_text(text, encoding="utf-8", newline="\n")

    def _ask(self, request: dict[str, Any]) -> list[dict[str, int]]:
        """Send a request to the switch and return its answer, the totals of all hosts."""
        path = registry.folder_of(self.name) / daemon.SOCKET
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(START_TIMEOUT_S)
                connection.connect(str(path))
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile(encoding="utf-8") as stream:
                    answer: list[dict[str, int]] = json.loads(stream.readline())
                    return answer
        except (OSError, ValueError) as error:
            raise LabError(
                "the switch of the lab does not answer", given=f"{self.name}: {error}"
            ) from error

    def _checked(self, host: int) -> int:
        if not 0 <= host < len(self._shapes):
            raise LabError(
                "there is no such host", given=host, expected=f"0 to {len(self._shapes) - 1}"
            )
        return host
