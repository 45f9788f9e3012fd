"""Ports that are known before anything listens on them, and that stay free meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from pathlib import Path

LOWEST, HIGHEST = 10_000, 30_000
"""Below those that the system gives to a process that asks for any port, as connections do."""

_choice = random.Random(os.getpid())
_taken: list[int] = []
"""Open files, whose locks tell other processes which ports this one has given."""


def free_port() -> int:
    """Return a port of the loopback without a listener, that no living process was given here."""
    while True:
        port = _choice.randrange(LOWEST, HIGHEST)
        if not _take(port):
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))  # some listen at all addresses
            except OSError:
                continue
        return port


def _take(port: int) -> bool:
    """Return whether no process has this port; keep it until this one ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    folder = Path(tempfile.gettempdir()) / f"atoll-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _taken.append(lock)
        return True
    os.close(lock)
    return False
