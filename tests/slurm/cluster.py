"""A Slurm cluster of one machine: munged, slurmctld and slurmd, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from bench.kit.ports import free_port
from tests.patience import PATIENCE_S

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
START_S = 60.0

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
KillWait=20
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def unavailable() -> str:
    """Return why there is no cluster here; empty: there may be one."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return (
        f"{missing[0]} is not installed (slurmctld, slurmd, slurm-client, munge)" if missing else ""
    )


class SlurmCluster:
    """The daemons; `environment` lets Slurm's commands find them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ, "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }  # fmt: skip

    def start(self) -> None:
        """Start the daemons; raises RuntimeError with their logs if the node does not come up."""
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        ports = [free_port(), free_port()]
        (folder / "slurm.conf").write_text(
            CONF.format(host=host, folder=folder, controller_port=ports[0], node_port=ports[1])
        )
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
            f"--key-file={key}", f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed", "--num-threads=1",
        )  # fmt: skip
        self._wait(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf"))
        self._daemon("slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", host)
        self._wait(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%t"), "slurmd")

    def ask(self, *words: str) -> str:
        """Return what one of Slurm's commands prints."""
        done = subprocess.run(
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout.strip()

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.ask("scancel", "--user=root")
        deadline = time.monotonic() + 30
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    words, env=self.environment, stdout=out, stderr=out, start_new_session=True
                )
            )

    def _wait(self, ready: object, name: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if ready():  # type: ignore[operator]
                return
            time.sleep(0.2)
        logs = [
            path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.[lo][ou]*")
        ]
        raise RuntimeError(f"{name} did not start: " + "\n".join(logs))
