"""The trainer's handle of the writer process: start, send, listen, kill."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from atoll.checkpoint.background.messages import Command, Report, WriterSetup, line, read_report
from atoll.errors import WireError

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "atoll.checkpoint.background.writer")


class WriterProcess:
    """One run of the writer process.

    Args:
        setup: The first message.
        inherited: Descriptors of the memory that it reads.
        on_report: Called with every report, in a thread of its own.
        on_end: Called in that thread after the last report.
        command: The program.
    """

    def __init__(
        self,
        setup: WriterSetup,
        *,
        inherited: Sequence[int],
        on_report: Callable[[Report], None],
        on_end: Callable[[], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start it; on Linux it dies with the *thread* that calls this.

        Raises:
            OSError: it cannot be started.
        """
        self._on_report, self._on_end = on_report, on_end
        self._popen = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(inherited) if sys.platform != "win32" else (),
        )
        self.send(setup)
        self._thread = threading.Thread(target=self._listen, name="writer-reports", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def send(self, command: Command) -> None:
        """Send a command; if the process is dead, `on_end` is called soon."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._popen.stdin.write(line(command))
            self._popen.stdin.flush()

    def end(self) -> None:
        """Kill the process; its current work stays unfinished."""
        self._popen.kill()
        self._popen.wait()
        self._thread.join()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _listen(self) -> None:
        assert self._popen.stdout is not None
        for data in self._popen.stdout:
            try:
                report = read_report(data)
            except WireError as error:
                logger.warning("%s", error)
                continue
            self._on_report(report)
        self._on_end()
