"""An agent in its own process, and what tests ask of the hub about it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.config import JobSpec, JobTable, dump_spec
from atoll.net.http.client import HubClient
from tests.patience import PATIENCE_S


class Node:
    """`python -m atoll.node` as a child of the test, after the statement `before` if given."""

    def __init__(self, ticket: str, home: Path, *options: str, before: str = "") -> None:
        main = "import sys; from atoll.node.__main__ import main; sys.exit(main())"
        program = ("-c", f"{before}\n{main}") if before else ("-m", "atoll.node")
        self.popen = subprocess.Popen(
            [
                *(sys.executable, *program, "--no-measure"),
                *("--ticket", ticket, "--home", str(home), *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> str:
        assert self.popen.stdout is not None
        return str(json.loads(self.popen.stdout.readline())["node"])

    def leave(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


def until(condition: Callable[[], Any], *, timeout_s: float = PATIENCE_S) -> Any:
    """Wait until a condition holds and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def submit(client: HubClient, script: str, *, nodes: int = 1) -> str:
    """Submit a job with a script; return its id."""
    spec = JobSpec(job=JobTable(name="job", script="s.py", nodes=nodes))
    return client.submit(dump_spec(spec), files={"s.py": script})


def wait_for(client: HubClient, job: str, state: str) -> dict[str, Any]:
    view: dict[str, Any] = until(lambda: (v := client.job(job))["state"] == state and v)
    return view


def lines_of(client: HubClient, job: str) -> list[str]:
    return [line["text"] for line in client.logs(job)["lines"]]


def all_lines(client: HubClient, job: str, *, last: str) -> list[str]:
    """Return all lines of a job once the last one is there.

    An agent reports the end of a process even if the hub has not taken its lines within seconds.
    """
    lines: list[str] = []
    after = 0

    def complete() -> bool:
        nonlocal after
        while batch := client.logs(job, after=after)["lines"]:
            lines.extend(line["text"] for line in batch)
            after = batch[-1]["id"]
        return last in lines

    until(complete)
    return lines
