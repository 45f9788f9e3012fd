"""What is compared: how each system's members are started on hosts, and ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.system import kill_group
from bench.kit.cluster import ROOT
from bench.peers.hosts import COORDINATOR, Hosts
from bench.peers.on_atoll import FP32, INT8, STREAMING
from bench.peers.setting import Setting
from bench.slowlink import Site

ALONE, GLOO, TORCHFT, HIVEMIND = "no communication", "plain gloo", "torchft", "hivemind"
RIVALS = {TORCHFT: "torchft", HIVEMIND: "hivemind"}
"""System -> the package that it needs."""
ATOLL = (FP32, INT8, STREAMING)
SYSTEMS = (ALONE, GLOO, TORCHFT, HIVEMIND, *ATOLL)
MODULES = {
    ALONE: "bench.peers.alone",
    GLOO: "bench.peers.on_gloo",
    TORCHFT: "bench.peers.on_torchft",
    HIVEMIND: "bench.peers.on_hivemind",
}
END_S = 30.0


class Running(Protocol):
    """A system whose members have been started."""

    def alive(self) -> bool:
        """Return whether its members can still come to an end."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


@dataclass
class Programs:
    """One program per member, and perhaps one for all."""

    hosts: Hosts
    folder: Path
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        """Start one; what it says is in `NAME.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return self.hosts.popen(
                host, command, cwd=ROOT, env=self.hosts.environment(), stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def alive(self) -> bool:
        """Return whether a member runs."""
        return any(process.poll() is None for process in self.members)

    def stop(self) -> None:
        """Wait for the members a little, and kill what is left, of what they have started, too."""
        for process in self.members:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                break
        for process in (*self.members, *self.others):
            kill_group(process.pid)
            process.wait()


def start_programs(
    system: str, hosts: Hosts, folder: Path, setting: Setting, *, python: str = sys.executable
) -> Programs:
    """Start the members of a system that has a program for each."""
    made, port = Programs(hosts, folder), str(hosts.free_port())
    central = hosts.address(COORDINATOR)
    if system == TORCHFT:
        program = str(Path(python).with_name("torchft_lighthouse"))
        words = [program, "--min_replicas=1", f"--bind={central}:{port}"]
        made.others.append(made.start(COORDINATOR, words, "lighthouse"))
    for slot in range(setting.members):
        own = hosts.address(slot + 1)
        further = {
            ALONE: [],
            GLOO: [hosts.address(1), port],
            TORCHFT: [own, f"http://{central}:{port}"],
            HIVEMIND: [own],
        }[system]
        words = [python, "-m", MODULES[system], str(folder), str(slot), *further]
        made.members.append(made.start(slot + 1, words, f"member{slot}"))
    return made


@dataclass
class Job:
    """A job on the nodes of a site that is up."""

    site: Site
    command: subprocess.Popen[str]

    def alive(self) -> bool:
        """Return whether the job goes on."""
        return self.command.poll() is None

    def stop(self) -> None:
        """Wait for the job's end a little, then ask it to end."""
        try:
            self.command.wait(END_S)
        except subprocess.TimeoutExpired:
            self.site.stop_jobs()
            self.command.wait(2 * END_S)


def start_job(system: str, site: Site, folder: Path, setting: Setting) -> Job:
    """Submit the job of a system; it goes on with as few as one member."""
    script = str(ROOT / "bench" / "peers" / "on_atoll.py")
    words = ["--nodes", str(setting.members), "--set", "checkpoint.every_s=0"]
    return Job(site, site.start(COORDINATOR, "run", script, *words, "--", str(folder), system))
