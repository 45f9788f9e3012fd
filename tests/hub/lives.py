"""Lives of a hub that end at a chosen instant: `python -m tests.hub.lives`, requested over a pipe.

Every life is a real process, forked from one that has imported everything, and the end is a real
`kill -9`. Instants are counted: before and after each commit of the database, and before and after
each rename by which a file appears. After a life that was killed the next one begins by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


class Instants:
    """Counts the instants of a life, and ends it at one of them."""

    def __init__(self, kill_at: int) -> None:
        self._kill_at = kill_at
        self._count = 0

    def passes(self, name: str) -> None:
        """One more instant; the process is gone if it was the chosen one."""
        self._count += 1
        if self._count == self._kill_at:
            say({"killed": name})
            os.kill(os.getpid(), signal.SIGKILL)


def watch(instants: Instants) -> None:
    """Count what the hub does to its disk from now on."""
    from atoll.hub.db import database
    from atoll.hub.storage import upload

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, /, *args: Any) -> sqlite3.Cursor:
            if sql != "COMMIT":
                return super().execute(sql, *args)
            instants.passes("before a commit")
            cursor = super().execute(sql, *args)
            instants.passes("after a commit")
            return cursor

    def watched(put_in_place: Callable[..., Any]) -> Callable[..., Any]:
        def put(temporary: Path, path: Path) -> Any:
            instants.passes("before a rename")
            status = put_in_place(temporary, path)
            instants.passes("after a rename")
            return status

        return put

    database.sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)  # type: ignore
    upload.put_in_place = watched(upload.put_in_place)


def live(*, folder: str, port: int, kill_at: int) -> None:
    """Be a hub until the end."""
    from atoll.hub.app import HubOptions
    from atoll.hub.rounds import service
    from atoll.hub.server import HubServer, run
    from atoll.rounds import timing

    # On a busy machine a member may be late or silent; every round is to have all of them.
    timing.MIN_GRACE_S = timing.BROKEN_S = timing.MAX_BROKEN_S = service.SILENT_S = PATIENCE_S
    watch(Instants(kill_at))
    base = Path(folder)
    server = HubServer(
        HubOptions(
            data=base / "data", jobs=base / "jobs", port=port, reducers=False,
            reconnect_grace_s=20.0,
        )
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    run(
        server,
        on_ready=lambda: say(
            {
                "ready": os.getpid(), "url": server.url, "ticket": server.ticket,
                "token": server.operator_token,
            }
        ),
    )  # fmt: skip


def say(line: dict[str, Any]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def serve() -> None:
    """Fork one life after the other, as requested on standard input."""
    from atoll.hub import server  # noqa: F401  (imported before the forks)

    for line in sys.stdin:
        request = json.loads(line)
        status = _life(**request)
        while os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            status = _life(**{**request, "kill_at": 0})
        say({"ended": status})


def _life(**request: Any) -> int:
    """Be the parent of one life; return how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            live(**request)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


class Lives:
    """The test's end of the pipe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.lives"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.killed = ""
        """At which instant the life was killed that was to be killed; empty: not yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for child in psutil.Process(self._process.pid).children():
            child.kill()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def begin(self, folder: Path, *, port: int, kill_at: int) -> dict[str, Any]:
        """Begin a life; return what it reports when it is ready, or the one after it."""
        self.killed = ""
        assert self._process.stdin is not None
        request = {"folder": str(folder), "port": port, "kill_at": kill_at}
        self._process.stdin.write(json.dumps(request) + "\n")
        while "ready" not in (line := self._next()):
            continue
        self._pid = int(line["ready"])
        return line

    def end(self) -> None:
        """End the life that is there now in order; return when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
        while "ended" not in (line := self._next()):
            if "ready" in line:  # the life after the one that was killed
                os.kill(int(line["ready"]), signal.SIGTERM)

    def _next(self) -> dict[str, Any]:
        line = self._lines.get(timeout=PATIENCE_S)
        self.killed = line.get("killed", self.killed)
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))


if __name__ == "__main__":
    serve()
