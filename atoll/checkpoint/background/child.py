"""Setup of a helper process: low priority, no group signals, and death with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import BinaryIO

from atoll import system
from atoll.checkpoint.background.messages import Report, line

NICENESS = 5
"""Training goes first; but with 10 a save on a busy machine takes minutes."""


class Reporter:
    """Sends reports from several threads over one pipe."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock = out, threading.Lock()

    def __call__(self, report: Report) -> None:
        """Send a report; end the process if the trainer has gone."""
        try:
            with self._lock:
                self._out.write(line(report))
                self._out.flush()
        except OSError:
            os._exit(0)


def lower_priority() -> tuple[BinaryIO, BinaryIO]:
    """Lower the priority, ignore group signals, die with the parent; return the pipes.

    Libraries' prints go to stderr from here on: stdout carries reports only.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    system.lower_priority(NICENESS)
    system.end_with_parent()
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, reports
