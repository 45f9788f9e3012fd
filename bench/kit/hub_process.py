"""A hub as a process of its own, for benchmarks: how to enter, and what it costs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

WAIT_S = 60.0
MEGABYTE = 1e6


@dataclass(frozen=True)
class RunningHub:
    """A hub process and how to enter."""

    url: str
    token: str
    process: psutil.Process
    ca: str = ""
    """PEM file of its authority; empty: it speaks plain HTTP."""

    def rss_mb(self) -> float:
        """Return its resident memory."""
        return float(self.process.memory_info().rss / MEGABYTE)

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def hub(*options: str) -> Iterator[tuple[RunningHub, float]]:
    """Run a hub on a free port; give it and the seconds until it was ready."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll.hub", "--no-reducers", *options),
                *("--data", str(Path(folder) / "data"), "--jobs", str(Path(folder) / "jobs")),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        with popen:
            assert popen.stdout is not None
            try:
                ready = json.loads(popen.stdout.readline())
                seconds = time.perf_counter() - started
                process = psutil.Process(popen.pid)
                token = ready["operator_token"]
                yield RunningHub(ready["url"], token, process, ready["ca"]), seconds
            finally:
                popen.terminate()
