"""Three replica groups of torchft and its lighthouse, as processes of this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.system import die_with_parent
from bench.kit.ports import free_port
from bench.recovery.notes import Traced, Watch
from bench.recovery.scenario import MEMBERS

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Timeouts:
    """What a user of torchft may set; None leaves the default of its lighthouse and manager."""

    heartbeat_ms: int | None = None
    join_ms: int | None = None
    operation_s: float = 0.0


SETTINGS = {
    "default": Timeouts(),
    "tuned": Timeouts(heartbeat_ms=1000, join_ms=1000, operation_s=5.0),
}


def torchft_is_here() -> bool:
    """Return whether the extra `[bench]` is installed."""
    return importlib.util.find_spec("torchft") is not None


class TorchftSide:
    """See `bench.recovery.scenario.Side`."""

    def __init__(self, folder: Path, timeouts: Timeouts, *, step_s: float, every: int) -> None:
        """Describe it; nothing runs before `start`."""
        self._folder, self._timeouts = folder, timeouts
        self._step_s, self._every = step_s, every
        self._lighthouse = ""
        self._running: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.watch = Watch(folder)

    def start(self) -> None:
        """Start the lighthouse with its own command, and three groups."""
        port = free_port()
        limits = {
            "--heartbeat_timeout_ms": self._timeouts.heartbeat_ms,
            "--join_timeout_ms": self._timeouts.join_ms,
        }
        given = [f"{k}={v}" for k, v in limits.items() if v is not None]
        program = Path(sys.executable).with_name("torchft_lighthouse")
        command = [str(program), "--min_replicas=1", f"--bind=127.0.0.1:{port}", *given]
        self._start(command, "lighthouse")
        self._lighthouse = f"http://127.0.0.1:{port}"
        for member in MEMBERS:
            self.restart(member)

    def restart(self, member: str) -> None:
        """Start a group of one process."""
        command = [
            *(sys.executable, "-m", "bench.recovery.with_torchft", str(self._folder), member),
            *(self._lighthouse, str(self._step_s), str(self._every)),
            str(self._timeouts.operation_s),
        ]
        self._start(command, member)

    def _start(self, command: list[str], name: str) -> None:
        log = (self._folder / f"{name}.log").open("ab")
        with log:
            self._running.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=die_with_parent(),
                )
            )

    def kill(self, traced: Traced) -> None:
        """`kill -9` a group."""
        os.kill(traced.pid, signal.SIGKILL)

    def freeze(self, traced: Traced) -> None:
        """SIGSTOP a group."""
        os.kill(traced.pid, signal.SIGSTOP)

    def thaw(self, traced: Traced) -> None:
        """SIGCONT a group."""
        os.kill(traced.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        """End everything at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.wait()
