"""A hub and a node that only reach an SSH host: docs/operate/nodes.md, with a real sshd."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kit.ports import free_port
from tests.e2e.conftest import Atoll, atoll, until

__all__ = ["atoll"]

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else "")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not SSHD or shutil.which("ssh") is None or os.geteuid() != 0, reason="there is no sshd here"
    ),
]

CONF = """
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
AllowTcpForwarding yes
"""


class SshHost:
    """An SSH host on loopback that forwards ports and nothing else is asked of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        for name in ("host_key", "user_key"):
            key = folder / name
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
            subprocess.run(command, check=True)
        (folder / "sshd_config").write_text(CONF.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        self._started: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "sshd.log").open("wb")
        command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config"), "-p", str(self.port)]
        self._started.append(subprocess.Popen(command, stderr=self._log, stdout=self._log))
        _await_port(self.port)

    def tunnel(self, flag: str, listens: int, to: int) -> subprocess.Popen[bytes]:
        """Carry a port of the SSH host to here (-R), or one of here to the SSH host (-L)."""
        forward = f"127.0.0.1:{listens}:127.0.0.1:{to}"
        command = [
            "ssh", "-N", flag, forward, "-p", str(self.port), "-i", str(self.folder / "user_key"),
            "-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
            "-o", "ExitOnForwardFailure=yes", "-o", "BatchMode=yes",
            f"{getpass.getuser()}@127.0.0.1",
        ]  # fmt: skip
        made = subprocess.Popen(command, stderr=self._log, stdout=self._log)
        self._started.append(made)
        _await_port(listens)
        return made

    def close(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}")


@pytest.fixture
def ssh_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHost]:
    host = SshHost(tmp_path_factory.mktemp("ssh"))
    try:
        yield host
    finally:
        host.close()


def test_a_node_joins_trains_and_outlives_a_broken_tunnel(atoll: Atoll, ssh_host: SshHost) -> None:
    at_host, at_node = free_port(), free_port()
    hub = atoll.hub("--tls", "on", "--advertise", f"127.0.0.1:{at_node}")
    own = int(hub.url.rpartition(":")[2])
    ssh_host.tunnel("-R", at_host, own)
    to_hub = ssh_host.tunnel("-L", at_node, at_host)
    ticket = atoll.run("ticket").out.strip()
    assert f"127.0.0.1:{at_node}/" in ticket  # it leads through the tunnel
    assert "~" in ticket  # and pins the hub, whatever the SSH host does

    atoll.join(ticket, name="far")
    with hub.client() as client:
        until(lambda: [node["node"] for node in client.nodes()] == ["far"])
    job = atoll.job(steps=60, every=10, paced=True, nodes="1")
    running = atoll.start("run", str(job))
    until(atoll.workers)
    to_hub.kill()
    to_hub.wait()
    ssh_host.tunnel("-L", at_node, at_host)
    done = running.wait()
    assert done.code == 0, done.both
    assert (atoll.job_folder() / "model.safetensors").exists()
