"""A process that computes steps of a round again, and the thread that gives it work.

The process is started for the first task and kept for the next ones, because to load the libraries
and to build the job takes seconds, a task of a short round less than one. It ends when nothing was
to do for a while, so that its memory is free again.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll import system
from atoll.errors import AtollError
from atoll.train.verification.child import ANSWER
from atoll.wire.messages import VerificationAnswer, VerificationTask

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""How long the process is kept without a task."""
END_S = 60.0
"""Longest wait for the thread at the end."""

Do = Callable[["Recomputer", VerificationTask], None]


class Recomputer:
    """Does one task after the other, on a thread of its own."""

    def __init__(self, name: str, command: Sequence[str], *, do: Do) -> None:
        """Start the thread; `do` is called there with every task, and calls :meth:`answer`."""
        self._command, self._do = list(command), do
        self._tasks: queue.SimpleQueue[VerificationTask | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._task: VerificationTask | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._computing = self._abandoned = self._closed = False
        # A process dies with the thread that started it (`system.die_with_parent`).
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def task(self) -> VerificationTask | None:
        """The task under way."""
        return self._task

    def give(self, task: VerificationTask) -> bool:
        """Begin a task; False: another one is under way."""
        with self._changing:
            if self._task is not None or self._closed:
                return False
            self._task, self._abandoned = task, False
        self._tasks.put(task)
        return True

    def keep(self, tasks: Collection[VerificationTask]) -> None:
        """Abandon the task under way unless it is one of these."""
        with self._changing:
            if self._task is not None and self._task not in tasks:
                self._abandoned = True
                if self._computing:
                    self._kill()

    def answer(self, task: VerificationTask, folder: Path) -> VerificationAnswer | None:
        """Let the process do the task in a folder; None: it was abandoned.

        See `child.py` for what is in the folder. A process that ends makes a failed answer.
        """
        process = self._running()
        if process is None or process.stdin is None or process.stdout is None:
            return None
        with suppress(OSError):  # it has ended: there is no answer then
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
        replied = process.stdout.readline()
        with self._changing:
            self._computing = False
            dropped = self._abandoned or self._closed
        if dropped:
            self._end()
            return None
        if replied:
            with suppress(OSError, msgspec.DecodeError):
                return msgspec.json.decode((folder / ANSWER).read_bytes(), type=VerificationAnswer)
        self._end()
        why = f"the process that computes it ended with status {process.returncode}"
        return VerificationAnswer(challenge=task.challenge, kind=task.kind, failed=why)

    def close(self) -> None:
        """End the process and the thread; what it computes is abandoned."""
        with self._changing:
            self._closed = True
            self._kill()
        self._tasks.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                self._end()
                continue
            if task is None:
                self._end()
                return
            try:
                self._do(self, task)
            except AtollError as error:
                log.info("verification: %s", error)
            except Exception:
                log.exception("verification")
            with self._changing:
                self._task = None

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the process, started if there is none; None: nothing is wanted any more."""
        with self._changing:
            if self._closed or self._abandoned:
                return None
            if self._process is None or self._process.poll() is not None:
                # What it prints goes where this process's own output goes, see `child.py`.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    preexec_fn=system.die_with_parent(),
                )  # fmt: skip
            self._computing = True
            return self._process

    def _end(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        with self._changing:
            self._kill()
            process, self._process = self._process, None
        if process is not None:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
